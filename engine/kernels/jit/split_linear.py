# mypy: ignore-errors
"""A linear layer over some dozens of rows, bound by the bytes of its weights: programs share a tile
of outputs by splitting K; one of them adds the parts, always in the same order.

Weights are numbers like x, or codes that become numbers in registers, with scales for each output
or for each output and group of columns.
"""

import triton
import triton.language as tl

from engine.kernels.jit.codes import halves, numbers, prefetch_scales, word_scale
from engine.kernels.jit.elementwise import activated, pdl_wait, prefetch_lines

#: The bits of a sum that has not come yet: a NaN that arithmetic does not make.
ABSENT = tl.constexpr(0xFFFFFFFF)


@triton.jit
def prefetch_weights(w, rows, first, last, K, BLOCK_K: tl.constexpr, tiles):
    """Ask the L2 cache for `tiles` tiles from column `first` on, none from `last` on, a line of 128
    bytes at a time."""
    line: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = BLOCK_K // line if line < BLOCK_K else 1
    for tile in range(tiles):
        at = first + tile * BLOCK_K + tl.arange(0, lines) * line
        at = tl.where(at < last, at, first)
        prefetch_lines(w + rows[:, None].to(tl.int64) * K + at[None, :])


@triton.jit
def prefetch_all(
    w, scales, rows, first, last, N, K, tiles,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, GROUPED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """`prefetch_weights` of a program's rows, and the scales of all groups of its columns."""
    num_rows = N * (1 + GATED)
    groups: tl.constexpr = 1 + PAIRED
    for half in tl.static_range(1 + GATED):
        mine = rows + half * N
        prefetch_weights(w, mine, first, last, K, BLOCK_K, tiles)
        if GROUPED:
            from_group, to_group = groups * (first // BLOCK_K), groups * (last // BLOCK_K)
            prefetch_scales(scales, mine, from_group, to_group, num_rows)


@triton.jit
def weight_tile(w, rows, cols, K):
    """[BLOCK_N, BLOCK_K] of the weights, read once."""
    pointers = w + rows[:, None].to(tl.int64) * K + cols[None, :]
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def x_tile(x, m, cols, M, K):
    """[BLOCK_K, BLOCK_M] of the rows of x."""
    pointers = x + m[None, :].to(tl.int64) * K + cols[:, None]
    return tl.load(pointers, mask=(m < M)[None, :], other=0.0)


@triton.jit
def add_product(
    acc, w, scales, rows, start, value, second, value_scale, K, NUM_ROWS,
    BLOCK_K: tl.constexpr, GROUPED: tl.constexpr, PAIRED: tl.constexpr, CODED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """acc + the product of columns [start, start + BLOCK_K) of the weights with the tile `value`
    of x. PAIRED: a column is a byte of two codes, the higher one for the tile `second`. GROUPED:
    the columns are a group, or two. CODED: `value` holds codes, too."""
    if GROUPED:
        group = (start // BLOCK_K) * (1 + PAIRED)
        scale = tl.load(scales + group * NUM_ROWS + rows)
    tile = weight_tile(w, rows, start + tl.arange(0, BLOCK_K), K)
    if PAIRED:
        second_scale = tl.load(scales + (group + 1) * NUM_ROWS + rows)
        low, high = halves(tile, scale, second_scale, value.dtype, FAST)
        acc += tl.dot(low, value) * word_scale(scale)[:, None]
        acc += tl.dot(high, second) * word_scale(second_scale)[:, None]
    else:
        if tile.dtype != value.dtype:
            tile = numbers(tile, value.dtype, FAST)
        if GROUPED or CODED:
            part = tl.dot(tile, value)
            if GROUPED:
                part *= scale[:, None]
            if CODED:
                part *= value_scale
            acc += part
        else:
            acc = tl.dot(tile, value, acc)
    return acc


@triton.jit
def scaled_sums(
    acc, scales, rows, unit, inverse,
    SCALED: tl.constexpr, GROUPED: tl.constexpr, PAIRED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] times what all their terms share."""
    if PAIRED:
        acc *= unit
    elif SCALED and not GROUPED:
        acc *= tl.load(scales + rows)[:, None]
    if NORM:
        acc *= inverse
    return acc


@triton.jit
def store_codes(value, ok, out, scales, where, tile, m, STRIDE: tl.constexpr):
    """Store a tile of outputs as e4m3 codes with a scale for each row."""
    largest = tl.max(tl.abs(value), axis=0)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    tl.store(scales + tile * STRIDE + m, scale)
    codes = (value / scale[None, :]).to(out.dtype.element_ty)
    tl.store(out + where, codes, mask=ok)


@triton.jit
def row_inputs(
    bias, residual, gain, rows, where, ok,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """What `write_rows` reads: bias [BLOCK_N], residual [BLOCK_N, BLOCK_M] and gain [BLOCK_N] of a
    tile, or anything."""
    added, before, gains = rows, rows, rows
    if BIAS:
        added = tl.load(bias + rows)
    if RESIDUAL:
        before = tl.load(residual + where, mask=ok, other=0.0)
    if NEXT:
        gains = tl.load(gain + rows)
    return added, before, gains


@triton.jit
def write_rows(
    acc, acc_up, added, before, gains, out, out_scales, x_next, x_next_scales, squares_next, tile,
    where, ok, m,
    STRIDE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    NEXT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """out[m, rows] = f(acc + bias) + residual, from sums [BLOCK_N, BLOCK_M] and `row_inputs`; what
    the next product needs of it when NEXT. Where out or x_next holds codes, they have a scale for
    each tile."""
    if BIAS:
        acc += added.to(tl.float32)[:, None]
    if out.dtype.element_ty.is_fp8():
        if GATED:
            acc = activated(acc, GELU) * acc_up
        store_codes(tl.where(ok, acc, 0.0), ok, out, out_scales, where, tile, m, STRIDE)
    else:
        if GATED:
            gate = acc.to(out.dtype.element_ty).to(tl.float32)
            act = activated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
            acc = act * acc_up.to(out.dtype.element_ty).to(tl.float32)
        if RESIDUAL:
            acc += before.to(tl.float32)
        value = acc.to(out.dtype.element_ty)
        tl.store(out + where, value, mask=ok)
        if NEXT:
            value = tl.where(ok, value.to(tl.float32), 0.0)
            tl.store(squares_next + tile * STRIDE + m, tl.sum(value * value, axis=0))
            value *= gains.to(tl.float32)[:, None]
            if x_next.dtype.element_ty.is_fp8():
                store_codes(value, ok, x_next, x_next_scales, where, tile, m, STRIDE)
            else:
                tl.store(x_next + where, value.to(x_next.dtype.element_ty), mask=ok)


@triton.jit
def read_parts(place, COUNT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr):
    """The sums of COUNT programs in their order, and the largest bits of any. Unrolled: all loads
    are under way at once, where a loop would wait for one after the other."""
    both: tl.constexpr = 2 if GATED else 1
    sums = tl.load(place, volatile=True)
    top = sums.to(tl.uint32, bitcast=True)
    sums_up = sums
    for other in tl.static_range(COUNT):
        if other > 0:
            part = tl.load(place + other * both * SIZE, volatile=True)
            top = tl.maximum(top, part.to(tl.uint32, bitcast=True))
            sums += part
        if GATED:
            part = tl.load(place + (other * both + 1) * SIZE, volatile=True)
            top = tl.maximum(top, part.to(tl.uint32, bitcast=True))
            sums_up = part if other == 0 else sums_up + part
    return sums, sums_up, tl.max(tl.max(top, axis=0), axis=0)


@triton.jit
def await_parts(place, OTHERS: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr):
    """The sums of all programs of a tile but that with the highest number, which calls this.
    Nothing says that a part has come but its numbers: ABSENT stands where they are not, and again
    when they have been read.

    Programs of a grid begin in the order of their numbers, which CUTLASS relies on, too: the others
    do not wait for a place on the card. Should a part not come for seconds, the launch fails.
    """
    sums, sums_up, top = read_parts(place, OTHERS, SIZE, GATED)
    polls = 1 << 22
    while (top == ABSENT) & (polls > 0):
        sums, sums_up, top = read_parts(place, OTHERS, SIZE, GATED)
        polls -= 1
    if top == ABSENT:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
    for part in tl.static_range(OTHERS * (1 + GATED)):
        tl.store(place.to(tl.pointer_type(tl.uint32)) + part * SIZE, ABSENT)
    return sums, sums_up


@triton.jit
def shared_sums(
    acc, acc_up, parts, arrived, tile, split, spot,
    SPLITS: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, AWAIT: tl.constexpr,
):  # fmt: skip
    """The sums of all programs of a tile, and whether this is the one that has them."""
    both: tl.constexpr = 2 if GATED else 1
    place = parts + (tile * SPLITS * both).to(tl.int64) * SIZE + spot
    mine = place + split * both * SIZE
    leaves = spot * 0 + split < SPLITS - AWAIT
    tl.store(mine, acc, mask=leaves, cache_modifier=".cg")
    if GATED:
        tl.store(mine + SIZE, acc_up, mask=leaves, cache_modifier=".cg")
    if AWAIT:
        adds = split == SPLITS - 1
        if adds:
            sums, sums_up = await_parts(place, SPLITS - 1, SIZE, GATED)
            acc, acc_up = sums + acc, sums_up + acc_up
    else:
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        adds = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if adds:
            acc, acc_up, _ = read_parts(place, SPLITS, SIZE, GATED)
            tl.store(arrived + tile, 0)
    return acc, acc_up, adds


@triton.jit(do_not_specialize=["prefetch"])
def split_linear(
    x, x_scales, w, scales, bias, residual, squares, out, out_scales, gain, x_next, x_next_scales,
    squares_next, parts, arrived, eps, unit, M, N, K, num_squares, prefetch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, SQUARES_P: tl.constexpr, STRIDE: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, NEXT: tl.constexpr,
    GELU: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr, PAIRED: tl.constexpr,
    CODED: tl.constexpr, FAST: tl.constexpr, AWAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] = f(x[M, K] @ w[N, K]^T + bias) + residual for M <= BLOCK_M; BLOCK_N divides N,
    BLOCK_K * UNROLL, the columns of one step of the pipeline, divides K. GATED: w is [2 N, K], gate
    rows first, f(gate, up) = act(gate) * up.

    SCALED: w holds codes, scales float32 [N] or, GROUPED, [K / BLOCK_K, N]. PAIRED: w is bytes
    [N, K] of two codes, x is [M, 2 K], BLOCK_K columns of bytes are two groups (`halves`), with
    words [2 K / BLOCK_K, N] for scales, in units of `unit`.
    CODED: x, too, holds codes, with scales float32 [K / BLOCK_K, STRIDE] of its rows. out and
    x_next hold codes where their type is e4m3, with scales [N / BLOCK_N, STRIDE]. FAST: x is
    bfloat16, and codes become that by instructions of the card.

    An RMS norm between two products takes no kernel: with NEXT the first leaves x_next = out * gain
    and, for each of its tiles, the sum of the squares of a row of out; with SQUARES_P the next one,
    which reads that x, scales its rows by the norm of those sums, float32 [num_squares, STRIDE].

    The grid is (tiles of outputs, SPLITS programs that share one). parts: float32, a tile of sums
    for each program (two when GATED). The last to finish adds them, by arrived: int32, zero for
    each tile before and after. AWAIT: the one with the highest number waits for those of the
    others; parts are ABSENT before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    step: tl.constexpr = BLOCK_K * UNROLL
    per_split = tl.cdiv(K // step, SPLITS) * step
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    num_rows = N * 2 if GATED else N
    if PDL:
        prefetch_all(w, scales, rows, first, last, N, K, prefetch, BLOCK_K, GATED, GROUPED, PAIRED)
    pdl_wait(PDL)
    if SQUARES_P:
        part = tl.arange(0, SQUARES_P)[:, None]
        there = (part < num_squares) & (m < M)[None, :]
        known = tl.load(squares + part * STRIDE + m[None, :], mask=there, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    width = K * 2 if PAIRED else K
    for begin in tl.range(first, last, step, num_stages=STAGES):
        for part_of_step in tl.static_range(UNROLL):
            start = begin + part_of_step * BLOCK_K
            cols = start * (1 + PAIRED) + tl.arange(0, BLOCK_K)
            value = x_tile(x, m, cols, M, width)
            second, value_scale = value, value
            if PAIRED:
                second = x_tile(x, m, cols + BLOCK_K, M, width)
            if CODED:
                value_scale = tl.load(x_scales + (start // BLOCK_K) * STRIDE + m)[None, :]
            acc = add_product(
                acc, w, scales, rows, start, value, second, value_scale, K, num_rows,
                BLOCK_K, GROUPED, PAIRED, CODED, FAST,
            )  # fmt: skip
            if GATED:
                acc_up = add_product(
                    acc_up, w, scales, rows + N, start, value, second, value_scale, K,
                    num_rows, BLOCK_K, GROUPED, PAIRED, CODED, FAST,
                )  # fmt: skip
    inverse = eps
    if SQUARES_P:
        inverse = tl.rsqrt(tl.sum(known, axis=0) / width + eps)[None, :]
    norm: tl.constexpr = SQUARES_P > 0
    acc = scaled_sums(acc, scales, rows, unit, inverse, SCALED, GROUPED, PAIRED, norm)
    if GATED:
        acc_up = scaled_sums(acc_up, scales, rows + N, unit, inverse, SCALED, GROUPED, PAIRED, norm)
    where = m[None, :].to(tl.int64) * N + rows[:, None]
    ok = (m < M)[None, :] & (rows < N)[:, None]
    added, before, gains = row_inputs(bias, residual, gain, rows, where, ok, BIAS, RESIDUAL, NEXT)
    adds = SPLITS == 1
    if SPLITS > 1:
        spot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        acc, acc_up, adds = shared_sums(
            acc, acc_up, parts, arrived, tile, split, spot, SPLITS, BLOCK_N * BLOCK_M, GATED, AWAIT
        )
    if adds:
        write_rows(
            acc, acc_up, added, before, gains, out, out_scales, x_next, x_next_scales, squares_next,
            tile, where, ok, m, STRIDE, GATED, RESIDUAL, BIAS, NEXT, GELU,
        )  # fmt: skip
