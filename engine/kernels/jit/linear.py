# mypy: ignore-errors
"""A linear layer over one row: one stream over the weights; norm, SwiGLU, residual and the sum over
ranks fused."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import activated, pdl_wait
from engine.kernels.jit.reduce import collect_sums, push_sums


@triton.jit
def load_weights(w, rows, row_ok, cols, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of the weight matrix [N, K], streamed: it is read once and evicted first."""
    pointers = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    if w.dtype.element_ty.is_fp8():
        # A thread holds as many columns in a row as of x, so that x stays where it is loaded.
        pointers = tl.max_contiguous(pointers, [1, 8])
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
def row_sums(
    x,
    w,
    scales,
    gain,
    eps,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """norm(x)[1, K] @ w[N, K]^T of this program's rows, and of rows N further down when GATED.

    NORM folds the RMS norm in: a tile of x is multiplied by `gain`, the sum of squares is gathered
    on the way, and the row's scale is applied to the product. SCALED: w holds codes with a scale
    for each row. The first weight tile is requested before the previous kernel is waited for, so
    that memory does not idle between kernels.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < N
    cols = tl.arange(0, BLOCK_K)
    tile = load_weights(w, rows, row_ok, cols, K, EVEN_N, EVEN_K)
    tile_up = tile
    if GATED:
        tile_up = load_weights(w, rows + N, row_ok, cols, K, EVEN_N, EVEN_K)
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
    acc = tl.sum(part, axis=1)
    acc_up = tl.sum(part_up, axis=1)
    total = tl.zeros([1], tl.float32) + tl.sum(squares, axis=0)
    if NORM:
        inverse = tl.rsqrt(total / K + eps)
        acc *= inverse
        acc_up *= inverse
    if SCALED:
        acc *= tl.load(scales + rows, mask=row_ok, other=0.0)
        if GATED:
            acc_up *= tl.load(scales + N + rows, mask=row_ok, other=0.0)
    return acc, acc_up


@triton.jit
def row_linear(
    x,
    w,
    scales,
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
    SCALED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[1, N] = f(norm(x)[1, K] @ w[N, K]^T + bias) + residual.

    GATED: w is [2 N, K], gate rows first, and f(gate, up) = act(gate) * up.
    """
    acc, acc_up = row_sums(
        x, w, scales, gain, eps, N, K,
        BLOCK_N, BLOCK_K, STAGES, NORM, GATED, SCALED, EVEN_N, EVEN_K, PDL,
    )  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = rows < N
    if BIAS:
        acc += tl.load(bias + rows, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        acc = activated(acc, GELU) * acc_up
    if RESIDUAL:
        acc += tl.load(residual + rows, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + rows, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["index", "max_polls", "rank"])
def shared_row_linear(
    x,
    w,
    scales,
    bias,
    h,
    mailboxes,
    done,
    failed,
    index,
    max_polls,
    rank,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    COLLECT: tl.constexpr,
):
    """h[1, N] += the sum over ranks of x[1, K] @ w[N, K]^T + bias, without a kernel of its own.

    The programs of the product push their sums to every rank (`push_sums`); the programs after them
    each wait for COLLECT sums of all ranks and add them to h. They come last, and are few, so that
    they never keep the others from running.
    """
    epoch = tl.load(done) + index + 1
    tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    if pid < tiles:
        acc, _ = row_sums(
            x, w, scales, x, 0.0, N, K,
            BLOCK_N, BLOCK_K, STAGES, False, False, SCALED, EVEN_N, EVEN_K, PDL,
        )  # fmt: skip
        rows = pid * BLOCK_N + tl.arange(0, BLOCK_N)
        ok = rows < N
        if BIAS:
            acc += tl.load(bias + rows, mask=ok, other=0.0).to(tl.float32)
        push_sums(acc, rows, ok, mailboxes, epoch, CAPACITY, rank, SIZE)
    else:
        at = (pid - tiles) * COLLECT + tl.arange(0, COLLECT)
        pdl_wait(PDL)
        collect_sums(h, at, N, mailboxes, epoch, failed, max_polls, CAPACITY, rank, SIZE, SIZE_P)
