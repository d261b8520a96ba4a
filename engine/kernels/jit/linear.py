# mypy: ignore-errors
"""A linear layer over one row: one stream over the weights; norm, SwiGLU, residual and the sum over
ranks fused."""

import triton
import triton.language as tl

from engine.kernels.jit.codes import raised_halves, wide, word_scale, word_zero
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
def load_inputs(pointers, ok, EVEN_K: tl.constexpr):
    """Inputs or gains, float32, 0 where not ok."""
    if EVEN_K:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def row_step(
    tile, tile_up, x, gain, at, K, acc, acc_up, squares,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of a single row's product, by multiply-add; sums stay spread over the tile."""
    value = load_inputs(x + at, at < K, EVEN_K)
    if NORM:
        squares += value * value
        value *= load_inputs(gain + at, at < K, EVEN_K)
    acc += wide(tile, FAST) * value[None, :]
    if GATED:
        acc_up += wide(tile_up, FAST) * value[None, :]
    return acc, acc_up, squares


@triton.jit
def number_sums(
    x, w, gain, rows, row_ok, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N], those of rows N further down, and the sum of squares, of w in numbers or
    e4m3 codes.

    The first weight tiles are requested before the previous kernel is waited for, so that memory
    does not idle between kernels. AHEAD: the loop is unrolled and asks for each tile so many steps
    before its turn; tiles of codes are too small to keep memory busy one at a time.
    """
    cols = tl.arange(0, BLOCK_K)
    tile = load_weights(w, rows, row_ok, cols, K, EVEN_N, EVEN_K)
    tile_up = tile
    if GATED:
        tile_up = load_weights(w, rows + N, row_ok, cols, K, EVEN_N, EVEN_K)
    soon, soon_up = tile, tile_up
    if AHEAD > 1 and STEPS > 1:
        soon = load_weights(w, rows, row_ok, cols + BLOCK_K, K, EVEN_N, EVEN_K)
        if GATED:
            soon_up = load_weights(w, rows + N, row_ok, cols + BLOCK_K, K, EVEN_N, EVEN_K)
    pdl_wait(PDL)
    squares = tl.zeros([BLOCK_K], tl.float32)
    part = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    part_up = part
    if AHEAD:
        for step in tl.static_range(STEPS):
            later, later_up = soon, soon_up
            if step + AHEAD < STEPS:
                at = (step + AHEAD) * BLOCK_K + cols
                later = load_weights(w, rows, row_ok, at, K, EVEN_N, EVEN_K)
                if GATED:
                    later_up = load_weights(w, rows + N, row_ok, at, K, EVEN_N, EVEN_K)
            part, part_up, squares = row_step(
                tile, tile_up, x, gain, step * BLOCK_K + cols, K, part, part_up, squares,
                NORM, GATED, EVEN_K, FAST,
            )  # fmt: skip
            if AHEAD > 1:
                tile, tile_up = soon, soon_up
                soon, soon_up = later, later_up
            else:
                tile, tile_up = later, later_up
    else:
        part, part_up, squares = row_step(
            tile, tile_up, x, gain, cols, K, part, part_up, squares, NORM, GATED, EVEN_K, FAST
        )
        for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            at = start + cols
            tile = load_weights(w, rows, row_ok, at, K, EVEN_N, EVEN_K)
            if GATED:
                tile_up = load_weights(w, rows + N, row_ok, at, K, EVEN_N, EVEN_K)
            part, part_up, squares = row_step(
                tile, tile_up, x, gain, at, K, part, part_up, squares, NORM, GATED, EVEN_K, FAST
            )
    return tl.sum(part, axis=1), tl.sum(part_up, axis=1), tl.sum(squares, axis=0)


@triton.jit
def load_pairs(
    w, words, rows, row_ok, step, K, NUM_ROWS,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of bytes [BLOCK_K, rows] of a matrix [NUM_ROWS, K / 2], and the words of the groups of
    columns in their low and high halves [BLOCK_K / 8, rows]: of each 8 bytes, which one thread
    holds, so that words stay where they are loaded."""
    byte = step * BLOCK_K + tl.arange(0, BLOCK_K)
    pointers = w + rows[None, :].to(tl.int64) * (K // 2) + byte[:, None]
    pointers = tl.max_contiguous(pointers, [8, 1])
    pair = (step * BLOCK_K + 8 * tl.arange(0, BLOCK_K // 8)) // GROUP
    word_at = words + (pair * 2)[:, None] * NUM_ROWS + rows[None, :]
    word_at = tl.max_contiguous(word_at, [1, 1])
    high_at = tl.max_contiguous(word_at + NUM_ROWS, [1, 1])
    if EVEN:
        tile = tl.load(pointers, eviction_policy="evict_first")
        return tile, tl.load(word_at), tl.load(high_at)
    tile_ok = (byte < K // 2)[:, None] & row_ok[None, :]
    tile = tl.load(pointers, mask=tile_ok, other=0, eviction_policy="evict_first")
    ok = (pair * 2 * GROUP < K)[:, None] & row_ok[None, :]
    return tile, tl.load(word_at, mask=ok, other=0), tl.load(high_at, mask=ok, other=0)


@triton.jit
def pair_inputs(
    x, gain, step, K,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The inputs [BLOCK_K] of the low and of the high halves, and the sum of both's squares."""
    byte = step * BLOCK_K + tl.arange(0, BLOCK_K)
    at = byte // GROUP * (2 * GROUP) + byte % GROUP
    ok = at < K
    low = load_inputs(x + at, ok, EVEN_K)
    high = load_inputs(x + at + GROUP, ok, EVEN_K)
    squares = low
    if NORM:
        squares = low * low + high * high
        low *= load_inputs(gain + at, ok, EVEN_K)
        high *= load_inputs(gain + at + GROUP, ok, EVEN_K)
    return low, high, squares


@triton.jit
def of_eight(value, BLOCK_K: tl.constexpr):
    """The sums of each 8 in [BLOCK_K]."""
    return tl.sum(tl.reshape(value, [BLOCK_K // 8, 8]), axis=1)


@triton.jit
def half_product(number, word, x, x_sum, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_K / 8, BLOCK_N]: sums of (128 + code) x less (128 + zero point) times those of x,
    times the scale."""
    part = tl.reshape(number * x[:, None], [BLOCK_K // 8, 8, BLOCK_N])
    part = tl.sum(part, axis=1) - word_zero(word).to(tl.float32) * x_sum[:, None]
    return part * word_scale(word)


@triton.jit
def pair_product(
    tile, low_word, high_word, low_x, high_x, low_sum, high_sum,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K / 8, BLOCK_N]: the products of a tile of bytes."""
    low, high = raised_halves(tile, FAST)
    acc = half_product(low, low_word, low_x, low_sum, BLOCK_K, BLOCK_N)
    return acc + half_product(high, high_word, high_x, high_sum, BLOCK_K, BLOCK_N)


@triton.jit
def pair_sums(
    x, w, words, gain, rows, row_ok, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`number_sums` of 4-bit numbers in pairs, BLOCK_K bytes a step, in units of their scales; each
    tile is asked for one step before its turn."""
    num_rows = N * (1 + GATED)
    even: tl.constexpr = EVEN_N and EVEN_K
    tile, low, high = load_pairs(w, words, rows, row_ok, 0, K, num_rows, BLOCK_K, GROUP, even)
    tile_up, low_up, high_up = tile, low, high
    if GATED:
        tile_up, low_up, high_up = load_pairs(
            w, words, rows + N, row_ok, 0, K, num_rows, BLOCK_K, GROUP, even
        )
    pdl_wait(PDL)
    squares = tl.zeros([BLOCK_K], tl.float32)
    acc = tl.zeros([BLOCK_K // 8, BLOCK_N], tl.float32)
    acc_up = acc
    for step in tl.static_range(STEPS):
        next_tile, next_low, next_high = tile, low, high
        next_up, next_low_up, next_high_up = tile_up, low_up, high_up
        if step + 1 < STEPS:
            next_tile, next_low, next_high = load_pairs(
                w, words, rows, row_ok, step + 1, K, num_rows, BLOCK_K, GROUP, even
            )
            if GATED:
                next_up, next_low_up, next_high_up = load_pairs(
                    w, words, rows + N, row_ok, step + 1, K, num_rows, BLOCK_K, GROUP, even
                )
        low_x, high_x, more = pair_inputs(x, gain, step, K, BLOCK_K, GROUP, NORM, EVEN_K)
        squares += more
        low_sum, high_sum = of_eight(low_x, BLOCK_K), of_eight(high_x, BLOCK_K)
        acc += pair_product(
            tile, low, high, low_x, high_x, low_sum, high_sum, BLOCK_K, BLOCK_N, FAST
        )
        if GATED:
            acc_up += pair_product(
                tile_up, low_up, high_up, low_x, high_x, low_sum, high_sum, BLOCK_K, BLOCK_N, FAST
            )
        tile, low, high = next_tile, next_low, next_high
        tile_up, low_up, high_up = next_up, next_low_up, next_high_up
    return tl.sum(acc, axis=0), tl.sum(acc_up, axis=0), tl.sum(squares, axis=0)


@triton.jit
def row_sums(
    x, w, scales, gain, unit, eps, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    GROUP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """norm(x)[1, K] @ w[N, K]^T of this program's rows, and of rows N further down when GATED.

    NORM folds the RMS norm in: a tile of x is multiplied by `gain`, the sum of squares is gathered
    on the way, and the row's scale is applied to the product. SCALED: w holds codes with a scale
    for each row. GROUP: w is bytes of two codes, with words for scales of GROUP columns, in units
    of `unit`. STEPS: tiles of BLOCK_K columns, or bytes, in a row.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < N
    if GROUP:
        acc, acc_up, squares = pair_sums(
            x, w, scales, gain, rows, row_ok, N, K,
            BLOCK_N, BLOCK_K, STEPS, GROUP, NORM, GATED, EVEN_N, EVEN_K, FAST, PDL,
        )  # fmt: skip
        acc *= unit
        acc_up *= unit
    else:
        acc, acc_up, squares = number_sums(
            x, w, gain, rows, row_ok, N, K,
            BLOCK_N, BLOCK_K, STAGES, STEPS, AHEAD, NORM, GATED, EVEN_N, EVEN_K, FAST, PDL,
        )  # fmt: skip
    total = tl.zeros([1], tl.float32) + squares
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
    unit,
    eps,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    FAST: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[1, N] = f(norm(x)[1, K] @ w[N, K]^T + bias) + residual.

    GATED: w is [2 N, K], gate rows first, and f(gate, up) = act(gate) * up.
    """
    acc, acc_up = row_sums(
        x, w, scales, gain, unit, eps, N, K, BLOCK_N, BLOCK_K, STAGES, STEPS, AHEAD,
        NORM, GATED, SCALED, GROUP, EVEN_N, EVEN_K, FAST, PDL,
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
    unit,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    FAST: tl.constexpr,
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
            x, w, scales, x, unit, 0.0, N, K, BLOCK_N, BLOCK_K, STAGES, STEPS, AHEAD,
            False, False, SCALED, GROUP, EVEN_N, EVEN_K, FAST, PDL,
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
