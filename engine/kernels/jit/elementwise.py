# mypy: ignore-errors
"""Row-wise kernels: RMSNorm, SwiGLU, RoPE with the paged KV write, embedding."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Let the next kernel start early, then wait for the previous one (programmatic launch)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_lines(pointers):
    """Ask the L2 cache for the lines of 128 bytes at `pointers`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rms_norm(x, gain, out, eps, HIDDEN, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = rms(x) * gain."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    weight = tl.load(gain + cols, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    value = tl.load(x + row * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * HIDDEN + cols, (normed * weight).to(out.dtype.element_ty), mask=mask)


@triton.jit
def head_norm(
    qkv, q_gain, k_gain, eps, WIDTH, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr
):
    """RMS norm of one query or key head of a row of qkv, in place."""
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_P)
    mask = dims < DIM
    gain = tl.load((q_gain if head < HEADS else k_gain) + dims, mask=mask, other=0.0)
    at = qkv + tl.program_id(0).to(tl.int64) * WIDTH + head * DIM + dims
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / DIM + eps)
    normed = (value * scale).to(qkv.dtype.element_ty).to(tl.float32)
    tl.store(at, (normed * gain.to(tl.float32)).to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul(gate_up, out, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[r, c] = silu(gate_up[r, c]) * gate_up[r, WIDTH + c]."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (act * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotated(base, row_ok, cos, sin, dims, dim_ok, HALF: tl.constexpr, DIM: tl.constexpr):
    """Load rows at `base` (pointers [rows, 1]) and rotate them by halves; returns float32."""
    mask = row_ok & dim_ok[None, :]
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    sign = tl.where(dims < HALF, -1.0, 1.0)
    value = tl.load(base + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(base + other[None, :], mask=mask, other=0.0).to(tl.float32)
    return value * cos[None, :] + sign[None, :] * partner * sin[None, :]


@triton.jit
def rope_write(
    qkv,
    cos_table,
    sin_table,
    positions,
    slots,
    pool,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_P: tl.constexpr,
    KV_HEADS_P: tl.constexpr,
    DIM_P: tl.constexpr,
):
    """Rotate q and k of one token in place and write k and v into the paged pool.

    qkv: [tokens, (HEADS + 2 KV_HEADS) * DIM]; pool: [block, 2, KV_HEADS, PAGE, DIM] of one layer;
    slots: block * PAGE + offset, or negative for a padding row, which is left alone.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        half: tl.constexpr = DIM // 2
        position = tl.load(positions + token).to(tl.int64)
        dims = tl.arange(0, DIM_P)
        dim_ok = dims < DIM
        angle = position * half + tl.where(dims < half, dims, dims - half)
        cos = tl.load(cos_table + angle, mask=dim_ok, other=0.0)
        sin = tl.load(sin_table + angle, mask=dim_ok, other=0.0)
        row = qkv + token * (HEADS + 2 * KV_HEADS) * DIM
        heads = tl.arange(0, HEADS_P)[:, None]
        kv_heads = tl.arange(0, KV_HEADS_P)[:, None]
        q_ok = heads < HEADS
        kv_ok = kv_heads < KV_HEADS
        q_base = row + heads * DIM
        k_base = row + (HEADS + kv_heads) * DIM
        v_base = row + (HEADS + KV_HEADS + kv_heads) * DIM
        q = rotated(q_base, q_ok, cos, sin, dims, dim_ok, half, DIM).to(qkv.dtype.element_ty)
        k = rotated(k_base, kv_ok, cos, sin, dims, dim_ok, half, DIM).to(qkv.dtype.element_ty)
        v = tl.load(v_base + dims[None, :], mask=kv_ok & dim_ok[None, :], other=0.0)
        tl.debug_barrier()
        tl.store(q_base + dims[None, :], q, mask=q_ok & dim_ok[None, :])
        tl.store(k_base + dims[None, :], k, mask=kv_ok & dim_ok[None, :])
        page = pool + (slot // PAGE) * (2 * KV_HEADS * PAGE * DIM) + (slot % PAGE) * DIM
        cell = page + kv_heads * (PAGE * DIM) + dims[None, :]
        tl.store(cell, k, mask=kv_ok & dim_ok[None, :])
        tl.store(cell + KV_HEADS * PAGE * DIM, v, mask=kv_ok & dim_ok[None, :])


@triton.jit
def embed(
    tokens,
    feed,
    previous,
    table,
    out,
    first_id,
    num_ids,
    HIDDEN,
    BLOCK: tl.constexpr,
):
    """out[r] = table[token - first_id], zero outside the table.

    token = previous[feed[r]] where feed[r] >= 0, else tokens[r].
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(feed + row)
    token = tl.load(tokens + row)
    if source >= 0:
        token = tl.load(previous + source)
    local = token.to(tl.int64) - first_id
    held = tl.where((local >= 0) & (local < num_ids), HIDDEN, 0)
    value = tl.load(table + local * HIDDEN + cols, mask=cols < held, other=0.0)
    tl.store(out + row * HIDDEN + cols, value, mask=cols < HIDDEN)
