"""The compiled products on quantised weights against float64 on the dequantised matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from engine.config import Quantization
from engine.kernels.native import build, kernels
from engine.quantization.at_load import quantise
from engine.quantization.weight import Encoding, QuantizedWeight
from tests.unit.engine.kernels.native.test_kernels import BF16, close, native

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler, or a processor without AVX-512 BF16"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


sizes = {
    "rows": st.sampled_from([1, 2, 3, 8, 9, 12, 13, 16, 25, 200]),
    "outputs": st.sampled_from([1, 16, 31, 33, 96]),
}


def weight_of(kind: Quantization, outputs: int, inputs: int, **changes: object) -> QuantizedWeight:
    matrix = torch.randn(outputs, inputs).to(BF16)
    return replace(quantise(matrix, kind), **changes)  # type: ignore[arg-type]


def meant(weight: QuantizedWeight, rows: int) -> Tensor:
    """The matrix, transposed; steps of many rows round it to bfloat16."""
    many = rows >= 128 and weight.encoding is Encoding.INT4
    return weight.dequantise(BF16 if many else torch.float64).double().t()


def quantised_inputs(x: Tensor, size: int = 64) -> Tensor:
    """x as signed bytes, with a scale for `size` inputs of a row."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)
    codes = (groups * inverse).round()
    return (codes.double() * largest.double() / 127).flatten(1)[:, : x.shape[1]]


@settings(max_examples=60)
@given(
    **sizes,
    inputs=st.sampled_from([1, 2, 63, 64, 130, 576]),
    symmetric=st.booleans(),
    added=st.booleans(),
)
def test_four_bits_multiply_exactly_what_they_mean(rows, outputs, inputs, symmetric, added):
    torch.manual_seed(rows * outputs + inputs)
    weight = weight_of(Quantization.INT4, outputs, inputs, quantizes_input=False)
    if symmetric:
        weight = replace(weight, zeros=None)
    x = torch.randn(rows, inputs).to(BF16)
    bias, residual = torch.randn(outputs).to(BF16), torch.randn(rows, outputs).to(BF16)
    exact = x.double() @ meant(weight, rows) + bias.double()
    linear = native().linear(weight, bias)
    assert isinstance(linear, kernels.NativeLinear)
    if added:
        close(linear.add(x, residual), exact + residual.double())
    else:
        close(linear(x), exact)


@settings(max_examples=40)
@given(
    **sizes,
    inputs=st.sampled_from([1, 2, 63, 64, 130, 576]),
    kind=st.sampled_from([Quantization.INT8, Quantization.INT4]),
    symmetric=st.booleans(),
    added=st.booleans(),
)
def test_inputs_are_quantised_where_the_format_says(rows, outputs, inputs, kind, symmetric, added):
    torch.manual_seed(rows * outputs + inputs)
    weight = weight_of(kind, outputs, inputs)
    if symmetric:
        weight = replace(weight, zeros=None)
    x = torch.randn(rows, inputs).to(BF16)
    bias, residual = torch.randn(outputs).to(BF16), torch.randn(rows, outputs).to(BF16)
    exact = quantised_inputs(x) @ meant(weight, 1) + bias.double()
    linear = native().linear(weight, bias)
    assert isinstance(linear, kernels.NativeLinear)
    if added:
        close(linear.add(x, residual), exact + residual.double())
    else:
        close(linear(x), exact)


@settings(max_examples=40)
@given(**sizes, kind=st.sampled_from([Quantization.INT8, Quantization.INT4]), biased=st.booleans())
def test_gated_products(rows, outputs, kind, biased):
    torch.manual_seed(rows * outputs)
    gate, up = weight_of(kind, outputs, 130), weight_of(kind, outputs, 130)
    x = (torch.randn(rows, 130) / 4).to(BF16)
    biases = [torch.randn(outputs).to(BF16) if biased else None for _ in range(2)]
    seen = quantised_inputs(x)
    sums = [
        seen @ meant(weight, 1) + (0 if bias is None else bias.double())
        for weight, bias in zip((gate, up), biases, strict=True)
    ]
    product = native().gated_linear(gate, up, *biases)
    assert isinstance(product, kernels.NativeGated)
    close(product(x), functional.silu(sums[0]) * sums[1])


@pytest.mark.parametrize("rows", [1, 130])
def test_slices_and_columns_in_another_order(rows: int) -> None:
    torch.manual_seed(rows)
    matrix, x = torch.randn(40, 200).to(BF16), torch.randn(rows, 90).to(BF16)
    part = quantise(matrix, Quantization.INT4, (50, 140))
    part = replace(part, quantizes_input=False)
    assert part.offset == 50
    close(native().linear(part, None)(x), x.double() @ meant(part, rows))
    order = torch.randperm(90)
    turned = replace(part, columns=order)
    close(native().linear(turned, None)(x), x.double() @ meant(turned, rows))


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_scales_that_16_bits_do_not_hold_run_dequantised(scales: str) -> None:
    kind = getattr(torch, scales)
    weight = weight_of(Quantization.INT4, 40, 128, quantizes_input=False)
    weight = replace(weight, scales=(torch.rand(40, 2) * 3e-7 + 1e-6).to(kind))
    x = torch.randn(3, 128).to(BF16)
    matrix = weight.dequantise(BF16 if scales == "float32" else torch.float64)
    close(native().linear(weight, None)(x), x.double() @ matrix.double().t())


def test_a_scale_per_row_of_four_bits() -> None:
    weight = weight_of(Quantization.INT4, 40, 64, group_size=64, quantizes_input=False)
    x = torch.randn(5, 64).to(BF16)
    close(native().linear(weight, None)(x), x.double() @ meant(weight, 1))


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("rows", [1, 13])
def test_groups_of_other_sizes(rows: int, size: int) -> None:
    matrix = weight_of(Quantization.INT4, 40, 256)
    shape = 40, 256 // size
    weight = replace(
        matrix,
        group_size=size,
        scales=(torch.rand(shape) + 0.1).half(),
        zeros=torch.randint(0, 16, shape).char(),
    )
    x = torch.randn(rows, 256).to(BF16)
    plain = replace(weight, quantizes_input=False)
    close(native().linear(plain, None)(x), x.double() @ meant(plain, 1))
    seen = quantised_inputs(x, min(size, 64))
    close(native().linear(weight, None)(x), seen @ meant(weight, 1))


@pytest.mark.parametrize("kind", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(kind: Quantization, quantises: bool, value: float) -> None:
    x = torch.ones(2, 128).to(BF16)
    x[1, 70] = value
    out = native().linear(weight_of(kind, 40, 128, quantizes_input=quantises), None)(x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_fp8_and_grouped_eight_bits_run_dequantised() -> None:
    x = torch.randn(3, 128).to(BF16)
    fp8 = weight_of(Quantization.FP8, 40, 128)
    grouped = weight_of(
        Quantization.INT8, 40, 128, group_size=64, scales=torch.rand(40, 2), quantizes_input=False
    )
    for weight in (fp8, grouped):
        close(native().linear(weight, None)(x), x.double() @ weight.dequantise().double().t())
