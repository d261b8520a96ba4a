# mypy: ignore-errors
"""Codes of quantised weights become numbers in registers; rows of numbers become codes."""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import activated, pdl_wait, prefetch_lines


@triton.jit
def split_bytes(codes, low_zero, high_zero):
    """The numbers low half + 128 - low_zero and high half + 128 - high_zero of each byte, bfloat16.

    A half h beside 0x43 is the bfloat16 128 + h. Four bytes make eight numbers in eleven
    instructions; by type conversions it is thirty.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 half;
        and.b32 half, $4, 0x0f0f0f0f;
        prmt.b32 $0, half, 0x43434343, 0x5140;
        prmt.b32 $1, half, 0x43434343, 0x7362;
        shr.u32 half, $4, 4;
        and.b32 half, half, 0x0f0f0f0f;
        prmt.b32 $2, half, 0x43434343, 0x5140;
        prmt.b32 $3, half, 0x43434343, 0x7362;
        sub.rn.bf16x2 $0, $0, $5;
        sub.rn.bf16x2 $1, $1, $6;
        sub.rn.bf16x2 $2, $2, $7;
        sub.rn.bf16x2 $3, $3, $8;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [codes, low_zero, high_zero],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def numbers(codes, dtype: tl.constexpr, FAST: tl.constexpr):
    """The values of codes, e4m3 or signed bytes, exact in `dtype`.

    FAST: to bfloat16, of e4m3 exponent and mantissa moved to their places and the difference of the
    exponents' biases made up for by a product; the cards' own conversion takes a quarter of the
    rate.
    """
    if FAST:
        values = byte_numbers(codes) if codes.dtype == tl.int8 else fast_numbers(codes)
    else:
        values = codes.to(dtype)
    return values


@triton.jit
def fast_numbers(codes):
    """The bfloat16 of e4m3 codes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, size, bias;
        mov.b32 bias, 0x7b807b80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 size, low, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, size, 0xea;
        shr.u32 size, high, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 high, high, 0x80008000, size, 0xea;
        mul.rn.bf16x2 $0, low, bias;
        mul.rn.bf16x2 $1, high, bias;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def byte_numbers(codes):
    """The bfloat16 of signed bytes: a byte + 128 beside 0x4b0000 is 2^23 more, float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 raised, base, word;
        .reg .f32 a, b, more;
        mov.b32 base, 0x4b000000;
        mov.f32 more, 0f4b000080;
        xor.b32 raised, $2, 0x80808080;
        prmt.b32 word, raised, base, 0x7440;
        mov.b32 a, word;
        sub.rn.f32 a, a, more;
        prmt.b32 word, raised, base, 0x7441;
        mov.b32 b, word;
        sub.rn.f32 b, b, more;
        cvt.rn.bf16x2.f32 $0, b, a;
        prmt.b32 word, raised, base, 0x7442;
        mov.b32 a, word;
        sub.rn.f32 a, a, more;
        prmt.b32 word, raised, base, 0x7443;
        mov.b32 b, word;
        sub.rn.f32 b, b, more;
        cvt.rn.bf16x2.f32 $1, b, a;
        }""",
        "=&r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def exact_halves(codes, FAST: tl.constexpr):
    """The values of e4m3 codes, float16, which has them all. FAST: four codes by three instructions
    where triton's own conversion takes seven."""
    if not FAST:
        return codes.to(tl.float16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=&r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def wide(values, FAST: tl.constexpr):
    """e4m3 codes, or numbers, in float32."""
    if values.dtype.is_fp8():
        values = exact_halves(values, FAST)
    return values.to(tl.float32)


@triton.jit
def read_as(value, dtype: tl.constexpr):
    """Numbers of a KV pool in `dtype`, in which it has them unless they are e4m3 codes."""
    if value.dtype.is_fp8():
        value = numbers(value, dtype, dtype == tl.bfloat16)
    return value


@triton.jit
def pair_of_halves(pairs, FAST: tl.constexpr):
    """The values of the low and the high e4m3 code of each 16 bits, float16, which has them all.
    FAST: by the cards' conversion of two codes at once."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 one, other;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 one, first;
            cvt.rn.f16x2.e4m3x2 other, second;
            prmt.b32 $0, one, other, 0x5410;
            prmt.b32 $1, one, other, 0x7632;
            }""",
            "=&r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def word_scale(word):
    """The scale in the high half of a word of pairs, float32."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def word_zero(word):
    """The zero point in the low half of a word of pairs, plus 128, bfloat16."""
    return word.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def halves(codes, low_word, high_word, dtype: tl.constexpr, FAST: tl.constexpr):
    """The two tiles of numbers in a tile of bytes [BLOCK_N, BLOCK_K], less the zero points in the
    words [BLOCK_N] of each."""
    low_zero, high_zero = word_zero(low_word)[:, None], word_zero(high_word)[:, None]
    if FAST:
        low_zeros, _ = tl.broadcast(low_zero, codes)
        high_zeros, _ = tl.broadcast(high_zero, codes)
        return split_bytes(codes, low_zeros, high_zeros)
    low = (codes & 15).to(tl.float32) - (low_zero.to(tl.float32) - 128.0)
    high = (codes >> 4).to(tl.float32) - (high_zero.to(tl.float32) - 128.0)
    return low.to(dtype), high.to(dtype)


@triton.jit
def raised_halves(codes, FAST: tl.constexpr):
    """The numbers low half + 128 and high half + 128 of each byte, float32: a half in the third
    byte of 0x43000000, one instruction for each."""
    if not FAST:
        return (codes & 15).to(tl.float32) + 128.0, (codes >> 4).to(tl.float32) + 128.0
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 half, base;
        mov.b32 base, 0x43000000;
        and.b32 half, $8, 0x0f0f0f0f;
        prmt.b32 $0, half, base, 0x7044;
        prmt.b32 $1, half, base, 0x7144;
        prmt.b32 $2, half, base, 0x7244;
        prmt.b32 $3, half, base, 0x7344;
        shr.u32 half, $8, 4;
        and.b32 half, half, 0x0f0f0f0f;
        prmt.b32 $4, half, base, 0x7044;
        prmt.b32 $5, half, base, 0x7144;
        prmt.b32 $6, half, base, 0x7244;
        prmt.b32 $7, half, base, 0x7344;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def prefetch_scales(scales, rows, first, last, N):
    """Ask the L2 cache for the scales of groups `first` to `last`."""
    for group in range(first, last):
        prefetch_lines(scales + group * N + rows)


@triton.jit
def write_codes(
    value,
    codes,
    scales,
    row,
    cols,
    WIDTH,
    STRIDE,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a row, float32 [BLOCK] and zero from WIDTH on, as e4m3 codes with a scale for each
    GROUP of columns; GROUP = BLOCK: for all."""
    if GROUP == BLOCK:
        largest = tl.max(tl.abs(value), axis=0)
        scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
        tl.store(scales + row, scale)
        value /= scale
    else:
        grouped = tl.reshape(value, [BLOCK // GROUP, GROUP])
        largest = tl.max(tl.abs(grouped), axis=1)
        scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group * STRIDE + row, scale, mask=group * GROUP < WIDTH)
        value = tl.reshape(grouped / scale[:, None], [BLOCK])
    tl.store(codes + row * WIDTH + cols, value.to(codes.dtype.element_ty), mask=cols < WIDTH)


@triton.jit(do_not_specialize=["ROWS"])
def norm_codes(
    h, delta, row_scales, channel_scales, gain, codes, scales, eps, ROWS, WIDTH, STRIDE,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes, scales = rms(h) * gain, or h itself without NORM; ADD: h += delta first, SCALED: times
    a scale for each row and one for each column. Rows from ROWS on are zero."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.where(row < ROWS, WIDTH, 0)
    if NORM:
        weight = tl.load(gain + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    value = tl.load(h + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(delta + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            more *= tl.load(channel_scales + cols, mask=mask, other=0.0)
            more *= tl.load(row_scales + row, mask=row < ROWS, other=0.0)
        value += more
        rounded = value.to(h.dtype.element_ty)
        tl.store(h + row * WIDTH + cols, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps) * weight
    write_codes(value, codes, scales, row, cols, WIDTH, STRIDE, BLOCK, GROUP)


@triton.jit(do_not_specialize=["ROWS"])
def gated_codes(
    gate_up, codes, scales, ROWS, WIDTH, STRIDE,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes, scales = act(left half) * right half of gate_up [rows, 2 WIDTH]. Rows from ROWS on
    are zero."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.where(row < ROWS, WIDTH, 0)
    gate = tl.load(gate_up + row * 2 * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    value = activated(gate, GELU) * up
    write_codes(value, codes, scales, row, cols, WIDTH, STRIDE, BLOCK, GROUP)


@triton.jit
def pair_numbers(
    pairs, words, channel_scales, codes, unit, N, WIDTH,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """e4m3 codes [N, 2 WIDTH] with a scale for each row, of a matrix in pairs [N, WIDTH]; one
    program for BLOCK_N rows and two groups of columns."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    cols = tl.arange(0, GROUP)
    ok = rows < N
    source = pairs + rows[:, None].to(tl.int64) * WIDTH + block * GROUP + cols[None, :]
    tile = tl.load(source, mask=ok[:, None], other=0)
    inverse = unit / tl.load(channel_scales + rows, mask=ok, other=1.0)
    for half in tl.static_range(2):
        word = tl.load(words + (block * 2 + half) * N + rows, mask=ok, other=0)
        number = ((tile >> (4 * half)) & 15).to(tl.float32)
        number -= (word_zero(word).to(tl.float32) - 128.0)[:, None]
        number *= (word_scale(word) * inverse)[:, None]
        target = codes + rows[:, None].to(tl.int64) * 2 * WIDTH
        target += (block * 2 + half) * GROUP + cols[None, :]
        tl.store(target, number.to(codes.dtype.element_ty), mask=ok[:, None])


@triton.jit
def group_numbers(
    codes, scales, numbers, N, WIDTH, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """numbers [N, WIDTH] = e4m3 codes times scales [WIDTH / GROUP, N]; one program for BLOCK_N rows
    and a group."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    ok = rows < N
    at = rows[:, None].to(tl.int64) * WIDTH + group * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scales + group * N + rows, mask=ok, other=0.0)
    value = tl.load(codes + at, mask=ok[:, None], other=0.0).to(tl.float32) * scale[:, None]
    tl.store(numbers + at, value.to(numbers.dtype.element_ty), mask=ok[:, None])
