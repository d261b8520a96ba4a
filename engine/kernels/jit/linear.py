# mypy: ignore-errors
"""A linear layer over one row: one stream over the weights; norm, SwiGLU and residual fused."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import pdl_wait


@triton.jit
def load_weights(w, rows, row_ok, cols, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of the weight matrix [N, K], streamed: it is read once and evicted first."""
    pointers = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(pointers, eviction_policy="evict_first")
    ok = row_ok[:, None] & (cols < K)[None, :]
    return tl.load(pointers, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def row_step(
    tile, tile_up, x, gain, at, K, acc, acc_up, squares, NORM: tl.constexpr, GATED: tl.constexpr
):
    """One tile of a single row's product, by multiply-add; sums stay spread over the tile."""
    value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    if NORM:
        squares += value * value
        value *= tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
    acc += tile.to(tl.float32) * value[None, :]
    if GATED:
        acc_up += tile_up.to(tl.float32) * value[None, :]
    return acc, acc_up, squares


@triton.jit
def prefetch_weights(w, rows, row_ok, K, BLOCK_K: tl.constexpr, TILES: tl.constexpr):
    """Ask the L2 cache for the next TILES tiles, a line of 64 two-byte weights at a time."""
    if TILES:
        at = BLOCK_K + tl.arange(0, TILES * BLOCK_K // 64) * 64
        inside = row_ok[:, None] & (at < K)[None, :]
        offsets = tl.where(inside, rows[:, None].to(tl.int64) * K + at[None, :], 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(w + offsets).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def row_linear(
    x,
    w,
    bias,
    residual,
    gain,
    out,
    eps,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """out[1, N] = f(norm(x)[1, K] @ w[N, K]^T + bias) + residual.

    NORM folds the RMS norm in: a tile of x is multiplied by `gain`, the sum of squares is gathered
    on the way, and the row's scale is applied to the product. GATED: w is [2 N, K], gate rows
    first, and f(gate, up) = silu(gate) * up. The first weight tile is requested before the previous
    kernel is waited for, so that memory does not idle between kernels; PREFETCH tiles after it are
    fetched into the cache.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < N
    cols = tl.arange(0, BLOCK_K)
    tile = load_weights(w, rows, row_ok, cols, K, EVEN_N, EVEN_K)
    tile_up = tile
    if GATED:
        tile_up = load_weights(w, rows + N, row_ok, cols, K, EVEN_N, EVEN_K)
    prefetch_weights(w, rows, row_ok, K, BLOCK_K, PREFETCH)
    if GATED:
        prefetch_weights(w, rows + N, row_ok, K, BLOCK_K, PREFETCH)
    pdl_wait(PDL)
    squares = tl.zeros([BLOCK_K], tl.float32)
    part = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    part_up = part
    part, part_up, squares = row_step(
        tile, tile_up, x, gain, cols, K, part, part_up, squares, NORM, GATED
    )
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        at = start + cols
        tile = load_weights(w, rows, row_ok, at, K, EVEN_N, EVEN_K)
        if GATED:
            tile_up = load_weights(w, rows + N, row_ok, at, K, EVEN_N, EVEN_K)
        part, part_up, squares = row_step(
            tile, tile_up, x, gain, at, K, part, part_up, squares, NORM, GATED
        )
    acc = tl.sum(part, axis=1)[:, None]
    acc_up = tl.sum(part_up, axis=1)[:, None]
    total = tl.zeros([1], tl.float32) + tl.sum(squares, axis=0)
    if NORM:
        inverse = tl.rsqrt(total / K + eps)[None, :]
        acc *= inverse
        acc_up *= inverse
    if BIAS:
        acc += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    where = rows[:, None]
    ok = row_ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual + where, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=ok)
