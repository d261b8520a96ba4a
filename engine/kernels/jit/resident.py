# mypy: ignore-errors
"""A linear layer over one row whose programs keep the row in registers and go through tiles of
outputs, asking for the weights of the next tile while they multiply those of the last one.

For weights in codes: their tiles are so small that a program for each (`row_linear`) begins and
ends as long as it waits for its weights, and a number takes so many instructions that these bound
it. So inputs of e4m3 codes are float16, brought into its range by a power of two for the whole row,
products of two codes are added at once in float16, those of four such pairs in float32. Inputs of
pairs and of signed bytes are bytes with a scale for each 16 of them, finer than any that weights
have: four products are one instruction, and sums exact up to a scale.
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
def byte_dots(codes, x, FAST: tl.constexpr):
    """int32: the sums of the eight signed bytes of each word times eight of inputs."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w0, w1, x0, x1;
            mov.b64 {w0, w1}, $1;
            mov.b64 {x0, x1}, $2;
            dp4a.s32.s32 $0, w0, x0, 0;
            dp4a.s32.s32 $0, w1, x1, $0;
            }""",
            "=&r,l,l",
            [codes, x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    acc = tl.zeros_like(codes).to(tl.int32)
    for index in tl.static_range(8):
        acc += (codes >> (8 * index)).to(tl.int8).to(tl.int32) * (x >> (8 * index)).to(tl.int8)
    return acc


@triton.jit
def byte_products(codes, low_x, high_x, FAST: tl.constexpr):
    """int32: the sums of the low halves of the eight bytes of each word times eight signed bytes of
    inputs, and of 16 times the high halves times eight others."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w0, w1, x0, x1, n;
            mov.b64 {w0, w1}, $2;
            mov.b64 {x0, x1}, $3;
            and.b32 n, w0, 0x0f0f0f0f;
            dp4a.u32.s32 $0, n, x0, 0;
            and.b32 n, w1, 0x0f0f0f0f;
            dp4a.u32.s32 $0, n, x1, $0;
            mov.b64 {x0, x1}, $4;
            and.b32 n, w0, 0xf0f0f0f0;
            dp4a.u32.s32 $1, n, x0, 0;
            and.b32 n, w1, 0xf0f0f0f0;
            dp4a.u32.s32 $1, n, x1, $1;
            }""",
            "=&r,=&r,l,l,l",
            [codes, low_x, high_x],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    low = tl.zeros_like(codes).to(tl.int32)
    high = low
    for index in tl.static_range(8):
        byte = ((codes >> (8 * index)) & 255).to(tl.int32)
        low += (byte & 15) * (low_x >> (8 * index)).to(tl.int8).to(tl.int32)
        high += (byte & 240) * (high_x >> (8 * index)).to(tl.int8).to(tl.int32)
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
def packed_inputs(x, SPAN: tl.constexpr):
    """float32 [8 SPAN] as two words [SPAN] of four float16 each."""
    even, odd = tl.split(tl.reshape(x, [2 * SPAN, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    four = two_halves(a, b) | (two_halves(c, d) << 32)
    return tl.split(tl.reshape(four, [SPAN, 2]))


@triton.jit
def byte_inputs(x, SPAN: tl.constexpr):
    """float32 [8 SPAN] as words [SPAN] of eight signed bytes; of each run of words the sum of its
    bytes and their scale [SPAN / RUN]."""
    runs: tl.constexpr = SPAN // RUN
    run = tl.reshape(x, [runs, 8 * RUN])
    largest = tl.max(tl.abs(run), axis=1)
    scale = tl.where(largest > 1e-30, largest / 127.0, 1.0)
    # 1.5 * 2^23 + i has i in its low bits, rounded.
    bits = (run / scale[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    total = tl.sum(bits - 0x4B400000, axis=1)
    byte = tl.reshape((bits & 255).to(tl.int64), [SPAN, 8])
    shift = (8 * tl.arange(0, 8)).to(tl.int64)
    # Bytes have no NaN: the scale has.
    return tl.sum(byte << shift[None, :], axis=1), total, scale + 0.0 * tl.sum(run, axis=1)


@triton.jit
def run_sums(products, less, SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """float32 [SPAN / RUN, BLOCK_N]: sums of products [SPAN, BLOCK_N] over runs, less `less`."""
    part = tl.sum(tl.reshape(products, [SPAN // RUN, RUN, BLOCK_N]), axis=1)
    part += 0x4B400000 - less
    return part.to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def tile_sums(
    tile, low, high, low_x, high_x, low_total, high_total, low_scale, high_scale,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N]: the products of a tile with x."""
    if GROUP:
        one, other = byte_products(tile, low_x[:, None], high_x[:, None], FAST)
        zeros = (low & 127) * low_total[:, None]
        acc = run_sums(one, zeros, SPAN, BLOCK_N) * (word_scale(low) * low_scale[:, None])
        zeros = (high & 127) * high_total[:, None]
        acc += run_sums(other, zeros, SPAN, BLOCK_N) * (word_scale(high) * high_scale[:, None])
    elif BYTES:
        dots = byte_dots(tile, low_x[:, None], FAST)
        acc = run_sums(dots, 0, SPAN, BLOCK_N) * low_scale[:, None]
    else:
        acc = code_products(tile, low_x[:, None], high_x[:, None], FAST)
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
    bytes_: tl.constexpr = w.dtype.element_ty == tl.int8
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
        low_x, low_total, low_scale = byte_inputs(value, SPAN)
        high_x, high_total, high_scale = byte_inputs(second, SPAN)
        high_total *= 16
        high_scale /= 16.0
        factor = unit
    elif bytes_:
        length = 8 * WORDS
        value, squares = row_inputs(x, gain, at, length, NORM, even)
        low_x, low_total, low_scale = byte_inputs(value, SPAN)
        high_x, high_total, high_scale = low_x, low_total, low_scale
        factor = unit
    else:
        length = 8 * WORDS
        value, squares = row_inputs(x, gain, at, length, NORM, even)
        largest, inverse = power_above(value)
        low_x, high_x = packed_inputs(value * (16.0 * inverse), SPAN)
        low_total, high_total, low_scale, high_scale = low_x, low_x, low_x, low_x
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
            tile, low, high, low_x, high_x, low_total, high_total, low_scale, high_scale,
            SPAN, BLOCK_N, GROUP, bytes_, FAST,
        )  # fmt: skip
        if GROUP == 0:
            acc *= tl.load(scales + rows)
        if BIAS:
            acc += tl.load(bias + rows).to(tl.float32)
        if GATED:
            up = factor * tile_sums(
                tile_up, low_up, high_up, low_x, high_x, low_total, high_total, low_scale,
                high_scale, SPAN, BLOCK_N, GROUP, bytes_, FAST,
            )  # fmt: skip
            if GROUP == 0:
                up *= tl.load(scales + N + rows)
            acc = activated(acc, GELU) * up
        if RESIDUAL:
            acc += tl.load(residual + rows).to(tl.float32)
        tl.store(out + rows, acc.to(out.dtype.element_ty))
        tile, low, high = next_tile, next_low, next_high
        tile_up, low_up, high_up = next_up, next_low_up, next_high_up
