# mypy: ignore-errors
"""A linear layer over one row whose programs keep the row in registers and go through tiles of
outputs, asking for the weights of the next tile while they multiply those of the last one.

For weights in codes: their tiles are so small that a program for each (`row_linear`) begins and
ends as long as it waits for its weights, and a number takes so many instructions that these bound
it. So inputs are float16, brought into its range by a power of two for the whole row, products of
two codes are added at once in float16, those of four such pairs in float32.
"""

import triton
import triton.language as tl

from engine.kernels.jit.codes import word_scale
from engine.kernels.jit.elementwise import activated, pdl_wait

#: 64-bit words of a row that one thread reads at once, and that share a scale and a zero point.
RUN = tl.constexpr(2)


@triton.jit
def half_at(packed, index: tl.constexpr):
    """One of the four float16 in 64 bits, float32."""
    bits = ((packed >> (16 * index)) & 65535).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def crossed_at(first, second, index: tl.constexpr):
    """One of eight float16 in two words with the second and the third of four exchanged."""
    four = first if index < 4 else second
    return half_at(four, (index % 2) * 2 + index % 4 // 2)


@triton.jit
def code_products(codes, first, second, FAST: tl.constexpr):
    """Sums of the eight e4m3 codes of each word times two words of float16 in the same order.

    Four products of at most 448 * 32 are added in float16.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w0, w1, x0, x1, x2, x3, a, b, sum;
            .reg .b16 low, high;
            .reg .f32 f, g;
            mov.b64 {w0, w1}, $1;
            mov.b64 {x0, x1}, $2;
            mov.b64 {x2, x3}, $3;
            mov.b32 {low, high}, w0;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            mul.rn.f16x2 sum, a, x0;
            fma.rn.f16x2 sum, b, x1, sum;
            mov.b32 {low, high}, w1;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            fma.rn.f16x2 sum, a, x2, sum;
            fma.rn.f16x2 sum, b, x3, sum;
            mov.b32 {low, high}, sum;
            cvt.f32.f16 f, low;
            cvt.f32.f16 g, high;
            add.f32 $0, f, g;
            }""",
            "=f,l,l,l",
            [codes, first, second],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    acc = tl.zeros_like(codes).to(tl.float32)
    for index in tl.static_range(8):
        code = ((codes >> (8 * index)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        x = half_at(first, index) if index < 4 else half_at(second, index - 4)
        acc += code.to(tl.float32) * x
    return acc


@triton.jit
def pair_products(
    codes, low_x, low_more, high_x, high_more, low_zero, high_zero, FAST: tl.constexpr
):  # fmt: skip
    """Sums of the low and of the high halves of the eight bytes of each word, less zero points,
    times two words of float16 each, in which the second and the third of four are exchanged.

    A half beside 0x64 is the float16 1024 + half, or 1024 + 16 half; zero points are twice
    -(1024 + zero), or -(64 + zero).
    """
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w0, w1, x0, x1, x2, x3, y0, y1, y2, y3, n, s, sixteenth, low, high;
            .reg .b16 a, b;
            .reg .f32 f, g;
            mov.b32 sixteenth, 0x2c002c00;
            mov.b64 {w0, w1}, $2;
            mov.b64 {x0, x1}, $3;
            mov.b64 {x2, x3}, $4;
            mov.b64 {y0, y1}, $5;
            mov.b64 {y2, y3}, $6;
            lop3.b32 n, w0, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 n, n, $7;
            mul.rn.f16x2 low, n, x0;
            lop3.b32 n, w0, 0x00f000f0, 0x64006400, 0xea;
            fma.rn.f16x2 n, n, sixteenth, $8;
            mul.rn.f16x2 high, n, y0;
            shr.u32 s, w0, 8;
            lop3.b32 n, s, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 n, n, $7;
            fma.rn.f16x2 low, n, x1, low;
            lop3.b32 n, s, 0x00f000f0, 0x64006400, 0xea;
            fma.rn.f16x2 n, n, sixteenth, $8;
            fma.rn.f16x2 high, n, y1, high;
            lop3.b32 n, w1, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 n, n, $7;
            fma.rn.f16x2 low, n, x2, low;
            lop3.b32 n, w1, 0x00f000f0, 0x64006400, 0xea;
            fma.rn.f16x2 n, n, sixteenth, $8;
            fma.rn.f16x2 high, n, y2, high;
            shr.u32 s, w1, 8;
            lop3.b32 n, s, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 n, n, $7;
            fma.rn.f16x2 low, n, x3, low;
            lop3.b32 n, s, 0x00f000f0, 0x64006400, 0xea;
            fma.rn.f16x2 n, n, sixteenth, $8;
            fma.rn.f16x2 high, n, y3, high;
            mov.b32 {a, b}, low;
            cvt.f32.f16 f, a;
            cvt.f32.f16 g, b;
            add.f32 $0, f, g;
            mov.b32 {a, b}, high;
            cvt.f32.f16 f, a;
            cvt.f32.f16 g, b;
            add.f32 $1, f, g;
            }""",
            "=&f,=f,l,l,l,l,l,r,r",
            [codes, low_x, low_more, high_x, high_more, low_zero, high_zero],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    low = tl.zeros_like(codes).to(tl.float32)
    high = low
    less = half_at(low_zero.to(tl.int64), 0) + 1024.0
    high_less = half_at(high_zero.to(tl.int64), 0) + 64.0
    for index in tl.static_range(8):
        x = crossed_at(low_x, low_more, index)
        low += (((codes >> (8 * index)) & 15).to(tl.float32) + less) * x
        x = crossed_at(high_x, high_more, index)
        high += (((codes >> (8 * index + 4)) & 15).to(tl.float32) + high_less) * x
    return low, high


@triton.jit
def load_words(
    w, scales, rows, limit, NUM_ROWS,
    WORDS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[SPAN, rows] of the weights, where rows are below the limit; of pairs also the words of the
    groups of columns in their low and high halves, [SPAN / RUN, rows]. Zero from WORDS on."""
    ok = (rows < limit)[None, :]
    cols = tl.arange(0, SPAN)[:, None]
    at = w.to(tl.pointer_type(tl.int64)) + rows[None, :].to(tl.int64) * WORDS + cols
    if WORDS == SPAN:
        tile = tl.load(at, mask=ok, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=ok & (cols < WORDS), other=0, eviction_policy="evict_first")
    low, high = tile, tile
    if GROUP:
        run = tl.arange(0, SPAN // RUN)
        low_at = scales + (run * (8 * RUN) // GROUP * 2)[:, None] * NUM_ROWS + rows[None, :]
        high_at = low_at + NUM_ROWS
        if WORDS == SPAN:
            low = tl.load(low_at, mask=ok)
            high = tl.load(high_at, mask=ok)
        else:
            there = ok & (run * RUN < WORDS)[:, None]
            low = tl.load(low_at, mask=there, other=0)
            high = tl.load(high_at, mask=there, other=0)
    return tile, low, high


@triton.jit
def two_halves(a, b):
    """Two float32 as float16 in 32 bits, in 64."""
    low = a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 65535
    return low | ((b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 65535) << 16)


@triton.jit
def packed_inputs(x, SPAN: tl.constexpr, CROSSED: tl.constexpr):
    """float32 [8 SPAN] as two words [SPAN] of four float16 each; CROSSED: with the second and the
    third of four exchanged."""
    even, odd = tl.split(tl.reshape(x, [2 * SPAN, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    if CROSSED:
        four = two_halves(a, c) | (two_halves(b, d) << 32)
    else:
        four = two_halves(a, b) | (two_halves(c, d) << 32)
    return tl.split(tl.reshape(four, [SPAN, 2]))


@triton.jit
def doubled(half):
    """16 bits in both halves of 32."""
    return half | (half << 16)


@triton.jit
def tile_sums(
    tile, low, high, low_x, low_more, high_x, high_more,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N]: the products of a tile with x."""
    if GROUP:
        runs: tl.constexpr = SPAN // RUN
        zero = doubled(0xE400 + (low & 127))
        low_zero = tl.reshape(
            tl.broadcast_to(zero[:, None, :], [runs, RUN, BLOCK_N]), [SPAN, BLOCK_N]
        )
        zero = doubled(0xD400 + ((high & 127) << 4))
        high_zero = tl.reshape(
            tl.broadcast_to(zero[:, None, :], [runs, RUN, BLOCK_N]), [SPAN, BLOCK_N]
        )
        one, other = pair_products(
            tile, low_x[:, None], low_more[:, None], high_x[:, None], high_more[:, None],
            low_zero, high_zero, FAST,
        )  # fmt: skip
        acc = tl.sum(tl.reshape(one, [runs, RUN, BLOCK_N]), axis=1) * word_scale(low)
        acc += tl.sum(tl.reshape(other, [runs, RUN, BLOCK_N]), axis=1) * word_scale(high)
    else:
        acc = code_products(tile, low_x[:, None], low_more[:, None], FAST)
    return tl.sum(acc, axis=0)


@triton.jit
def row_inputs(x, gain, at, K, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Inputs, times the gain where there is a norm, and their squares; 0 from K on."""
    if EVEN:
        value = tl.load(x + at).to(tl.float32)
    else:
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    squares = value * value
    if NORM:
        if EVEN:
            value *= tl.load(gain + at).to(tl.float32)
        else:
            value *= tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
    return value, squares


@triton.jit
def power_above(x):
    """2^e <= the largest |x| < 2^(e + 1), and 2^-e."""
    bits = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 8 << 23), 0x7E800000)  # 2^-e is normal
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def resident_linear(
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
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `row_linear` of weights in codes, of WORDS words of eight bytes a row, at most SPAN, a
    power of two. BLOCK_N divides N; GROUP is 0, or of pairs a multiple of 8 RUN bytes."""
    num_rows = N * (1 + GATED)
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    tile, low, high = load_words(w, scales, rows, N, num_rows, WORDS, SPAN, GROUP)
    tile_up, low_up, high_up = tile, low, high
    if GATED:
        tile_up, low_up, high_up = load_words(
            w, scales, rows + N, num_rows, num_rows, WORDS, SPAN, GROUP
        )
    pdl_wait(PDL)
    even: tl.constexpr = WORDS == SPAN
    at = tl.arange(0, 8 * SPAN)
    if GROUP:
        length = 16 * WORDS
        at = at // GROUP * (2 * GROUP) + at % GROUP
        value, squares = row_inputs(x, gain, at, length, NORM, even)
        second, more = row_inputs(x, gain, at + GROUP, length, NORM, even)
        squares += more
        largest, inverse = power_above(tl.maximum(tl.abs(value), tl.abs(second)))
        low_x, low_more = packed_inputs(value * (16.0 * inverse), SPAN, True)
        high_x, high_more = packed_inputs(second * (16.0 * inverse), SPAN, True)
        factor = largest * (unit / 16.0)
    else:
        length = 8 * WORDS
        value, squares = row_inputs(x, gain, at, length, NORM, even)
        largest, inverse = power_above(value)
        low_x, low_more = packed_inputs(value * (16.0 * inverse), SPAN, False)
        high_x, high_more = low_x, low_more
        factor = largest / 16.0
    if NORM:
        factor *= tl.rsqrt(tl.sum(squares, axis=0) / length + eps)
    stride = tl.num_programs(0) * BLOCK_N
    for start in tl.range(first, N, stride, num_stages=1):
        rows = start + tl.arange(0, BLOCK_N)
        ahead = rows + stride
        next_tile, next_low, next_high = load_words(
            w, scales, ahead, N, num_rows, WORDS, SPAN, GROUP
        )
        next_up, next_low_up, next_high_up = next_tile, next_low, next_high
        if GATED:
            limit = tl.where(start + stride < N, num_rows, 0)
            next_up, next_low_up, next_high_up = load_words(
                w, scales, ahead + N, limit, num_rows, WORDS, SPAN, GROUP
            )
        acc = factor * tile_sums(
            tile, low, high, low_x, low_more, high_x, high_more, SPAN, BLOCK_N, GROUP, FAST
        )
        if GROUP == 0:
            acc *= tl.load(scales + rows)
        if BIAS:
            acc += tl.load(bias + rows).to(tl.float32)
        if GATED:
            up = factor * tile_sums(
                tile_up, low_up, high_up, low_x, low_more, high_x, high_more,
                SPAN, BLOCK_N, GROUP, FAST,
            )  # fmt: skip
            if GROUP == 0:
                up *= tl.load(scales + N + rows)
            acc = activated(acc, GELU) * up
        if RESIDUAL:
            acc += tl.load(residual + rows).to(tl.float32)
        tl.store(out + rows, acc.to(out.dtype.element_ty))
        tile, low, high = next_tile, next_low, next_high
        tile_up, low_up, high_up = next_up, next_low_up, next_high_up
