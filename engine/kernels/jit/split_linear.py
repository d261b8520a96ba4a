# mypy: ignore-errors
"""A linear layer over some dozens of rows, bound by the bytes of its weights: programs share a tile
of outputs by splitting K; the last to finish adds the parts, always in the same order."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import activated, pdl_wait, prefetch_lines


@triton.jit
def prefetch_weights(w, rows, first, last, K, BLOCK_K: tl.constexpr, tiles):
    """Ask the L2 cache for `tiles` tiles from column `first` on, none from `last` on, a line of 64
    two-byte weights at a time."""
    lines: tl.constexpr = BLOCK_K // 64 if BLOCK_K > 64 else 1
    for tile in range(tiles):
        at = first + tile * BLOCK_K + tl.arange(0, lines) * 64
        at = tl.where(at < last, at, first)
        prefetch_lines(w + rows[:, None].to(tl.int64) * K + at[None, :])


@triton.jit
def weight_tile(w, rows, cols, K):
    """[BLOCK_N, BLOCK_K] of the weights, read once."""
    pointers = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def write_rows(
    acc,
    acc_up,
    bias,
    residual,
    out,
    gain,
    x_next,
    squares_next,
    tile,
    rows,
    m,
    M,
    N,
    STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    NEXT: tl.constexpr,
    GELU: tl.constexpr,
):
    """out[m, rows] = f(acc + bias) + residual, from sums [BLOCK_N, BLOCK_M]; what the next product
    needs of it when NEXT."""
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        act = activated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
        acc = act * acc_up.to(out.dtype.element_ty).to(tl.float32)
    where = m[None, :].to(tl.int64) * N + rows[:, None]
    ok = (m < M)[None, :] & (rows < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual + where, mask=ok, other=0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + where, value, mask=ok)
    if NEXT:
        value = tl.where(ok, value.to(tl.float32), 0.0)
        tl.store(squares_next + tile * STRIDE + m, tl.sum(value * value, axis=0))
        value *= tl.load(gain + rows).to(tl.float32)[:, None]
        tl.store(x_next + where, value.to(x_next.dtype.element_ty), mask=ok)


@triton.jit
def leave_part(acc, acc_up, parts, index, spot, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Put a program's sums where the last of its tile finds them."""
    both: tl.constexpr = 2 if GATED else 1
    mine = parts + (index * both).to(tl.int64) * SIZE
    tl.store(mine + spot, acc, cache_modifier=".cg")
    if GATED:
        tl.store(mine + SIZE + spot, acc_up, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's part is written before the arrival is counted


@triton.jit
def add_parts(
    parts, first, splits, spot, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GATED: tl.constexpr
):
    """The sums of all programs of a tile, in their order."""
    both: tl.constexpr = 2 if GATED else 1
    size: tl.constexpr = BLOCK_N * BLOCK_M
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for other in range(splits):
        part = parts + ((first + other) * both).to(tl.int64) * size
        acc += tl.load(part + spot, cache_modifier=".cg")
        if GATED:
            acc_up += tl.load(part + size + spot, cache_modifier=".cg")
    return acc, acc_up


@triton.jit(do_not_specialize=["prefetch"])
def split_linear(
    x,
    w,
    bias,
    residual,
    squares,
    out,
    gain,
    x_next,
    squares_next,
    parts,
    arrived,
    eps,
    M,
    N,
    K,
    num_squares,
    prefetch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES_P: tl.constexpr,
    STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    NEXT: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[M, N] = f(x[M, K] @ w[N, K]^T + bias) + residual for M <= BLOCK_M; BLOCK_N divides N,
    BLOCK_K divides K. GATED: w is [2 N, K], gate rows first, f(gate, up) = act(gate) * up.

    An RMS norm between two products takes no kernel: with NEXT the first leaves x_next = out * gain
    and, for each of its tiles, the sum of the squares of a row of out; with SQUARES_P the next one,
    which reads that x, scales its rows by the norm of those sums, float32 [num_squares, STRIDE].

    The grid is (tiles of outputs, programs that SHARE one). parts: float32, a tile of sums for each
    program (two when GATED); arrived: int32, zero for each tile before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    per_split = tl.cdiv(K // BLOCK_K, splits) * BLOCK_K
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    if PDL:
        prefetch_weights(w, rows, first, last, K, BLOCK_K, prefetch)
        if GATED:
            prefetch_weights(w, rows + N, first, last, K, BLOCK_K, prefetch)
    pdl_wait(PDL)
    if SQUARES_P:
        part = tl.arange(0, SQUARES_P)[:, None]
        known = tl.load(squares + part * STRIDE + m[None, :], mask=part < num_squares, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        value = tl.load(
            x + m[None, :].to(tl.int64) * K + cols[:, None], mask=(m < M)[None, :], other=0.0
        )
        acc = tl.dot(weight_tile(w, rows, cols, K), value, acc)
        if GATED:
            acc_up = tl.dot(weight_tile(w, rows + N, cols, K), value, acc_up)
    if SQUARES_P:
        inverse = tl.rsqrt(tl.sum(known, axis=0) / K + eps)[None, :]
        acc *= inverse
        if GATED:
            acc_up *= inverse
    if not SHARE:
        write_rows(
            acc, acc_up, bias, residual, out, gain, x_next, squares_next, tile, rows, m, M, N,
            STRIDE, GATED, RESIDUAL, BIAS, NEXT, GELU,
        )  # fmt: skip
    else:
        spot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        leave_part(acc, acc_up, parts, tile * splits + split, spot, BLOCK_N * BLOCK_M, GATED)
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            acc, acc_up = add_parts(parts, tile * splits, splits, spot, BLOCK_N, BLOCK_M, GATED)
            tl.store(arrived + tile, 0)
            write_rows(
                acc, acc_up, bias, residual, out, gain, x_next, squares_next, tile, rows, m, M, N,
                STRIDE, GATED, RESIDUAL, BIAS, NEXT, GELU,
            )  # fmt: skip
