# mypy: ignore-errors
"""Row-wise kernels: norms, gates of the MLP, RoPE with the paged KV write, embedding, softcaps."""

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
    normed = (value * scale).to(gain.dtype.element_ty).to(tl.float32)
    tl.store(out + row * HIDDEN + cols, (normed * weight).to(out.dtype.element_ty), mask=mask)


@triton.jit
def mark_damaged(x, flags, WIDTH, BLOCK: tl.constexpr):
    """flags[r] = 1 where row r of x `[rows, WIDTH]` has NaN or infinities, else 0."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    value = tl.load(x + row * WIDTH + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    damaged = (value != value) | (tl.abs(value) == float("inf"))
    tl.store(flags + row, tl.max(damaged.to(tl.int32), axis=0))


@triton.jit
def copy_words(source, target, BLOCK: tl.constexpr):
    """target = source, BLOCK words by each program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def add_normed(
    y,
    post_gain,
    h,
    gain,
    out,
    eps,
    HIDDEN,
    BLOCK: tl.constexpr,
    NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """h += rms(y) * post_gain; with NEXT, out = rms(h) * gain of the new h."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    post = tl.load(post_gain + cols, mask=mask, other=0.0)
    if NEXT:
        following = tl.load(gain + cols, mask=mask, other=0.0)
    pdl_wait(PDL)
    at = row * HIDDEN + cols
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    normed = (value * scale).to(post.dtype).to(tl.float32) * post.to(tl.float32)
    after = (before + normed.to(h.dtype.element_ty).to(tl.float32)).to(h.dtype.element_ty)
    tl.store(h + at, after, mask=mask)
    if NEXT:
        value = after.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
        normed = (value * scale).to(following.dtype).to(tl.float32) * following.to(tl.float32)
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_parts(
    qkv,
    q_gain,
    k_gain,
    squares,
    eps,
    STRIDE,
    Q_WIDTH,
    K_WIDTH,
    Q_TOTAL,
    K_TOTAL,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    READ: tl.constexpr,
):
    """RMS norm of a row's queries (part 0) or keys (part 1) over all heads, in place.

    Heads of several ranks: first each WRITEs the sums of its squares `[rows, 2]`, then it READs
    the sums of all ranks, of Q_TOTAL and K_TOTAL numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    width = tl.where(part == 0, Q_WIDTH, K_WIDTH)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    at = qkv + row * STRIDE + part * Q_WIDTH + cols
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if READ:
        total = tl.load(squares + row * 2 + part)
    else:
        total = tl.sum(value * value, axis=0)
    if WRITE:
        tl.store(squares + row * 2 + part, total)
    else:
        gain = tl.load(q_gain + cols, mask=cols < tl.where(part == 0, width, 0), other=0.0)
        gain += tl.load(k_gain + cols, mask=cols < tl.where(part == 0, 0, width), other=0.0)
        scale = tl.rsqrt(total / tl.where(part == 0, Q_TOTAL, K_TOTAL) + eps)
        normed = value * scale * gain.to(tl.float32)
        tl.store(at, normed.to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """silu(gate), or the tanh approximation of GELU; both are gate * sigmoid(z)."""
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-z))


@triton.jit
def gated_product(gate_up, out, WIDTH, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    """out[r, c] = act(gate_up[r, c]) * gate_up[r, WIDTH + c]."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    act = activated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (act * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP) in float32."""
    return CAP - 2.0 * CAP / (tl.exp2(x * (2.8853900817779268 / CAP)) + 1.0)


@triton.jit
def cap_logits(logits, WIDTH, BLOCK: tl.constexpr, CAP: tl.constexpr):
    """Softcap of logits `[rows, WIDTH]` in place."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + tl.program_id(0).to(tl.int64) * WIDTH + cols
    value = tl.load(at, mask=cols < WIDTH, other=0.0).to(tl.float32)
    tl.store(at, capped(value, CAP).to(logits.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def rotated(
    base,
    row_ok,
    cos,
    sin,
    dims,
    dim_ok,
    gain,
    eps,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load rows at `base` (pointers [rows, 1]) and rotate them by halves; returns float32. NORM:
    each is RMS-normed first, times gain."""
    mask = row_ok & dim_ok[None, :]
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    sign = tl.where(dims < HALF, -1.0, 1.0)
    value = tl.load(base + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(base + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
        own = tl.load(gain + dims, mask=dim_ok, other=0.0)
        others = tl.load(gain + other, mask=dim_ok, other=0.0)
        kind = base.dtype.element_ty
        value = (value * scale).to(own.dtype).to(tl.float32) * own.to(tl.float32)[None, :]
        partner = (partner * scale).to(own.dtype).to(tl.float32) * others.to(tl.float32)[None, :]
        value, partner = value.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)
    return value * cos[None, :] + sign[None, :] * partner * sin[None, :]


@triton.jit
def rotate_heads(
    base, inside, cos, sin, gain, eps, HALF: tl.constexpr, HALF_P: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Rotate heads at `base` (pointers [heads, 1]) in place, RMS-normed first with NORM; returns
    their halves."""
    kind: tl.constexpr = base.dtype.element_ty
    dims = tl.arange(0, HALF_P)
    ok = inside & (dims < HALF)[None, :]
    low = tl.load(base + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    high = tl.load(base + HALF + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        own = tl.load(gain + dims, mask=dims < HALF, other=0.0)[None, :]
        other = tl.load(gain + HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        low = (low * scale).to(own.dtype).to(tl.float32) * own.to(tl.float32)
        high = (high * scale).to(own.dtype).to(tl.float32) * other.to(tl.float32)
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    first = (low * cos - high * sin).to(kind)
    second = (high * cos + low * sin).to(kind)
    tl.debug_barrier()  # threads may hold the same element
    tl.store(base + dims[None, :], first, mask=ok)
    tl.store(base + HALF + dims[None, :], second, mask=ok)
    return first, second


@triton.jit
def rope_write(
    qkv,
    cos_table,
    sin_table,
    positions,
    slots,
    pool,
    q_gain,
    k_gain,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_P: tl.constexpr,
    KV_HEADS_P: tl.constexpr,
    HALF_P: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate q and k of one token in place, normed by head with NORM, and write k and v into the
    paged pool.

    qkv: [tokens, (HEADS + 2 KV_HEADS) * DIM]; pool: [block, 2, KV_HEADS, PAGE, DIM] of one layer;
    slots: block * PAGE + offset, or negative for a padding row, which is left alone.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        half: tl.constexpr = DIM // 2
        dims = tl.arange(0, HALF_P)
        angle = tl.load(positions + token).to(tl.int64) * half + dims
        cos = tl.load(cos_table + angle, mask=dims < half, other=0.0)[None, :]
        sin = tl.load(sin_table + angle, mask=dims < half, other=0.0)[None, :]
        row = qkv + token * (HEADS + 2 * KV_HEADS) * DIM
        heads = tl.arange(0, HEADS_P)[:, None]
        kv_heads = tl.arange(0, KV_HEADS_P)[:, None]
        kv_ok = kv_heads < KV_HEADS
        at = row + heads * DIM
        rotate_heads(at, heads < HEADS, cos, sin, q_gain, eps, half, HALF_P, NORM)
        at = row + (HEADS + kv_heads) * DIM
        first, second = rotate_heads(at, kv_ok, cos, sin, k_gain, eps, half, HALF_P, NORM)
        page = pool + (slot // PAGE) * (2 * KV_HEADS * PAGE * DIM) + (slot % PAGE) * DIM
        cell = page + kv_heads * (PAGE * DIM)
        stored: tl.constexpr = pool.dtype.element_ty
        ok = kv_ok & (dims < half)[None, :]
        tl.store(cell + dims[None, :], first.to(tl.float32).to(stored), mask=ok)
        tl.store(cell + half + dims[None, :], second.to(tl.float32).to(stored), mask=ok)
        dims = tl.arange(0, 2 * HALF_P)[None, :]
        ok = kv_ok & (dims < DIM)
        v = tl.load(at + KV_HEADS * DIM + dims, mask=ok, other=0.0)
        tl.store(cell + KV_HEADS * PAGE * DIM + dims, v.to(tl.float32).to(stored), mask=ok)


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
    scale,
    BLOCK: tl.constexpr,
):
    """out[r] = scale * table[token - first_id], zero outside the table.

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
    value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * HIDDEN + cols, value, mask=cols < HIDDEN)
