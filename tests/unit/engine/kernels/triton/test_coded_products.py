"""Products of few rows over codes, against the numbers that the codes stand for."""

import pytest
import torch

from engine.kernels.triton.coded import CodedRows, CodedWeight, pair_codes, pair_words
from engine.kernels.triton.linear import LinearShape, linear, shape_for
from engine.kernels.triton.split_linear import (
    MAX_ROWS,
    NextInput,
    SplitScratch,
    SplitShape,
    scratch_sizes,
    split_linear,
)
from tests.support.rounded_steps import unpair_codes

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
E4M3 = torch.float8_e4m3fn
#: Half a unit of their three mantissa bits.
UNIT = 2.0**-4


def fp8_weight(n, k, groups, device):
    codes = torch.randn(n, k, device=device).mul(100.0).clamp(-448.0, 448.0).to(E4M3)
    scales = torch.rand(groups, n, device=device) * 0.01 / k**0.5
    wide = codes.double().unflatten(1, (groups, -1)) * scales.double().T[:, :, None]
    return CodedWeight(codes=codes, scales=scales), wide.flatten(1)


def int4_weight(n, k, group, device):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    groups = k // group
    scales = (torch.rand(groups, n, device=device) / k**0.5).to(HALF)
    zeros = torch.randint(0, 16, (groups, n), device=device)
    wide = codes.double().unflatten(1, (groups, group)) - zeros.double().T[:, :, None]
    wide *= scales.double().T[:, :, None]
    words, unit = pair_words(scales, zeros)
    weight = CodedWeight(codes=pair_codes(codes, group), scales=words, unit=unit, takes_codes=False)
    assert torch.equal(unpair_codes(weight.codes, group), codes)
    return weight, wide.flatten(1)


def coded_rows(rows, k, group, device):
    codes = torch.randn(rows, k, device=device).mul(100.0).clamp(-448.0, 448.0).to(E4M3)
    scales = torch.rand(k // group, MAX_ROWS, device=device) * 0.02
    wide = codes.double().unflatten(1, (k // group, group))
    wide = wide * scales[:, :rows].double().T[:, :, None]
    return CodedRows(codes=codes, scales=scales), wide.flatten(1)


def numbers_of(coded, group):
    """What codes of a product's output stand for."""
    rows, n = coded.shape
    scales = coded.scales[: n // group, :rows].double().T
    return (coded.codes.double().unflatten(1, (n // group, group)) * scales[:, :, None]).flatten(1)


def int8_weight(n, k, device):
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scales = torch.rand(1, n, device=device) * 0.01 / k**0.5
    weight = CodedWeight(codes=codes, scales=scales, takes_codes=False)
    return weight, codes.double() * scales.double().T


def weight_of(form, n, k, device):
    if form == "bytes":
        return int8_weight(n, k, device)
    if form == "channels":
        return fp8_weight(n, k, 1, device)
    if form == "blocks":
        return fp8_weight(n, k, k // 64, device)
    return int4_weight(n, k, 64, device)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", ["channels", "blocks", "pairs", "bytes"])
def test_coded_weights(device, rows, splits, gated, form):
    n, k = 64, 384
    x = torch.randn(rows, k, device=device).to(HALF)
    weight, numbers = weight_of(form, 2 * n if gated else n, k, device)
    assert weight.shape == (numbers.shape[0], k)
    want = x.double() @ numbers.T
    if gated:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    shape = SplitShape(
        block_n=32, block_k=64, splits=splits, stages=2, warps=2, unroll=3 if rows == 1 else 1
    )
    scratch = SplitScratch(device, *scratch_sizes(rows, n, gated, shape))
    out = torch.full((rows, n), float("nan"), device=device).to(HALF)
    split_linear(x, weight, scratch, shape, out=out, gated=gated)
    assert (out.double() - want).norm() / want.norm() < 1e-2


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("form", ["channels", "blocks"])
def test_codes_from_product_to_product(device, rows, splits, form):
    """A layer's MLP: rows, a norm, gate and up, down, all codes in between."""
    group, hidden, n, k = 64, 128, 192, 128
    cut = SplitShape(block_n=group, block_k=group, splits=splits, stages=2, warps=4)
    scratch = SplitScratch(device, *scratch_sizes(rows, n, True, cut))
    x, x_numbers = coded_rows(rows, k, group, device)
    h = torch.randn(rows, hidden, device=device).to(HALF)
    (first, first_numbers), (second, second_numbers), (third, third_numbers) = (
        weight_of(form, *size, device) for size in ((hidden, k), (2 * n, hidden), (hidden, n))
    )
    gain = torch.rand(hidden, device=device).to(HALF)
    ahead = CodedRows(
        codes=torch.empty(rows, hidden, device=device, dtype=E4M3),
        scales=torch.full((hidden // group, MAX_ROWS), float("nan"), device=device),
    )
    squares = torch.full((hidden // group, MAX_ROWS), float("nan"), device=device)
    following = NextInput(gain=gain, x=ahead, squares=squares)
    wide = h.double() + x_numbers @ first_numbers.T
    split_linear(x, first, scratch, cut, out=h, residual=h, following=following)
    assert (h.double() - wide).norm() / wide.norm() < 1e-2
    got = numbers_of(ahead, group)
    want = h.double() * gain.double()
    assert (got - want).abs().max() <= want.abs().max() * UNIT
    assert (got - want).norm() / want.norm() < UNIT * 0.6

    act = CodedRows(
        codes=torch.empty(rows, n, device=device, dtype=E4M3),
        scales=torch.full((n // group, MAX_ROWS), float("nan"), device=device),
    )
    split_linear(ahead, second, scratch, cut, out=act, squares=squares, eps=1e-5, gated=True)
    inverse = torch.rsqrt(h.double().square().mean(-1, keepdim=True) + 1e-5)
    gate, up = ((got * inverse) @ second_numbers.T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    got = numbers_of(act, group)
    assert (got - want).norm() / want.norm() < UNIT * 0.6

    out = torch.full((rows, hidden), float("nan"), device=device).to(HALF)
    split_linear(act, third, scratch, cut, out=out)
    want = got @ third_numbers.T
    assert (out.double() - want).norm() / want.norm() < 1e-2


def as_bytes(x):
    """Inputs as programs that keep a row for pairs or bytes have them: 127 steps for the largest of
    16."""
    runs = x.unflatten(1, (-1, 16))
    scale = runs.abs().amax(-1, keepdim=True) / 127.0
    return ((runs / scale).round() * scale).flatten(1)


@pytest.mark.parametrize(
    ("form", "n", "k"),
    [
        ("channels", 48, 256),
        ("channels", 40, 100),
        ("pairs", 40, 384),
        ("pairs", 48, 512),
        ("bytes", 48, 256),
        ("bytes", 40, 80),
    ],
)
@pytest.mark.parametrize("fused", ["plain", "norm", "gated", "residual"])
def test_one_row(device, form, n, k, fused):
    x = torch.randn(1, k, device=device).mul(100.0 if fused == "norm" else 0.01).to(HALF)
    gated = fused == "gated"
    weight, numbers = weight_of(form, 2 * n if gated else n, k, device)
    gain = torch.rand(k, device=device).to(HALF) if fused in ("norm", "gated") else None
    residual = torch.randn(1, n, device=device).to(HALF) if fused == "residual" else None
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()

    def product(wide):
        want = wide @ numbers.T
        if gated:
            want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
        return want if residual is None else want + residual.double()

    for shape in (
        LinearShape(block_n=8, block_k=64, stages=1, warps=4),
        LinearShape(block_n=16, block_k=128, stages=3, warps=4),
        LinearShape(block_n=8, block_k=256, stages=1, warps=1, ahead=1),
        LinearShape(block_n=4, block_k=64, stages=1, warps=2, ahead=2),
        LinearShape(block_n=4, block_k=0, stages=1, warps=1, programs=5),
        LinearShape(block_n=2, block_k=0, stages=1, warps=2, programs=7),
    ):
        if shape.programs and k % 8:
            continue
        out = torch.full((1, n), float("nan"), device=device).to(HALF)
        linear(x, weight, out=out, gain=gain, eps=1e-5, residual=residual, gated=gated, shape=shape)
        want = product(as_bytes(wide) if shape.programs and form != "channels" else wide)
        assert (out.double() - want).norm() / want.norm() < 3e-3


@pytest.mark.parametrize("form", ["channels", "pairs", "bytes"])
def test_a_damaged_row_is_seen_in_its_products(device, form):
    n, k = 16, 384
    x = torch.randn(1, k, device=device).to(HALF)
    x[0, 7] = float("nan")
    weight, _ = weight_of(form, n, k, device)
    out = torch.zeros(1, n, device=device, dtype=HALF)
    shape = LinearShape(block_n=4, block_k=0, stages=1, warps=1, programs=2)
    linear(x, weight, out=out, shape=shape)
    assert out.isnan().all()


def test_programs_keep_a_row_of_half_precision():
    """Of sizes for which threads have words and registers; others, and float32, take tiles."""

    def programs(form, n, k, gated=False, dtype=torch.bfloat16):
        width, groups = (k // 2, k // 64) if form == "pairs" else (k, 1)
        weight = CodedWeight(
            codes=torch.empty(
                n * (1 + gated), width, device="meta", dtype=torch.uint8 if groups > 1 else E4M3
            ),
            scales=torch.empty(groups, n * (1 + gated), device="meta"),
        )
        shape = shape_for(torch.empty(1, k, device="meta", dtype=dtype), weight, n, gated)
        assert not shape.programs or n % shape.block_n == 0
        return shape.programs

    for form in ("channels", "pairs"):
        assert programs(form, 6144, 4096) == (768 if form == "channels" else 384)
        assert programs(form, 14336, 4096, gated=True) > 300
        assert programs(form, 14336, 4096, gated=True, dtype=torch.float32) == 0
        assert programs(form, 4096, 4096) == (0 if form == "channels" else 256)
        assert programs(form, 2048, 4096) == programs(form, 6144, 1000) == 0
        assert programs(form, 6146, 4096) == programs(form, 2, 4096, gated=True) == 0
    assert (programs("channels", 4096, 14336), programs("pairs", 4096, 14336)) == (0, 256)
