"""Quantised matrices: every operation equals the same operation on the dequantised matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import Quantization
from engine.quantization.at_load import INT4_GROUP, quantise
from engine.quantization.weight import (
    Encoding,
    QuantizedWeight,
    dense,
    halves,
    joined,
    pack_nibbles,
    unpack_nibbles,
)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def block_fp8(rows: int, columns: int, seed: int = 0, block: int = 128) -> QuantizedWeight:
    """Scales of blocks, the last row and column of them partial."""
    scales = matrix(-(-rows // block), -(-columns // block), seed + 1).abs() + 0.1
    return QuantizedWeight(
        encoding=Encoding.FP8,
        codes=matrix(rows, columns, seed).to(torch.float8_e4m3fn),
        scales=scales,
        group_size=block,
        row_block=block,
        num_inputs=columns,
        dtype=torch.float32,
        quantizes_input=True,
    )


FORMS = {
    "fp8": quantise(matrix(150, 80), Quantization.FP8),
    "int8": quantise(matrix(150, 80), Quantization.INT8),
    "int4": quantise(matrix(150, 80), Quantization.INT4),
    "block": block_fp8(150, 200),
    "ordered": replace(
        quantise(matrix(150, 80), Quantization.INT4),
        columns=torch.randperm(80, generator=torch.Generator().manual_seed(3)),
    ),
}
each_form = pytest.mark.parametrize("name", FORMS)


def test_nibbles_keep_odd_widths() -> None:
    codes = torch.arange(15).repeat(3, 1)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, 8)
    assert int(packed[0, 1]) == 2 | 3 << 4
    assert unpack_nibbles(packed, 15).equal(codes.byte())


def test_a_value_is_code_minus_zero_times_scale() -> None:
    weight = QuantizedWeight(
        encoding=Encoding.INT4,
        codes=pack_nibbles(torch.tensor([[0, 15, 8, 9, 1]])),
        scales=torch.tensor([[0.5, 2.0]]),
        zeros=torch.tensor([[1, 8]], dtype=torch.int8),
        group_size=4,
        offset=2,
        num_inputs=5,
        dtype=torch.float32,
    )
    assert weight.dequantise().tolist() == [[-0.5, 7.0, 0.0, 2.0, -14.0]]
    assert replace(weight, zeros=None).dequantise().tolist() == [[-4.0, 3.5, 0.0, 2.0, -14.0]]


@each_form
def test_rows_are_taken_split_padded_and_scaled(name: str) -> None:
    weight, whole = FORMS[name], FORMS[name].dequantise()
    order = torch.randperm(150)
    assert weight.take(order).dequantise().equal(whole[order])
    for first in (75, 128):
        parts = weight.split_rows(first)
        assert torch.cat([part.dequantise() for part in parts]).equal(whole)
    assert weight.padded(160).dequantise().abs()[150:].max() == 0
    assert weight.padded(160).dequantise()[:150].equal(whole)
    torch.testing.assert_close(weight.scaled(0.22).dequantise(), whole * 0.22)
    assert weight.shape == whole.shape


@each_form
def test_matrices_join_below_each_other(name: str) -> None:
    first, second = halves(FORMS[name])
    both = joined([first, second, FORMS[name]])
    assert isinstance(both, QuantizedWeight)
    assert both.dequantise().equal(torch.cat([FORMS[name].dequantise()] * 2))


def test_aligned_blocks_stay_blocks_and_others_become_rows() -> None:
    aligned = joined([block_fp8(256, 200), block_fp8(150, 200, seed=5)])
    assert isinstance(aligned, QuantizedWeight)
    assert (aligned.row_block, aligned.scales.shape) == (128, (4, 2))
    cut = joined([block_fp8(150, 200), block_fp8(256, 200, seed=5)])
    assert isinstance(cut, QuantizedWeight)
    assert (cut.row_block, cut.scales.shape) == (1, (406, 2))


def test_matrices_of_unlike_forms_join_dequantised() -> None:
    parts = [FORMS["int8"], FORMS["int4"], matrix(3, 80)]
    both = joined(parts)
    assert isinstance(both, torch.Tensor)
    assert both.equal(torch.cat([dense(part) for part in parts]))


def test_zero_points_join_with_the_middle_of_codes_without() -> None:
    symmetric = replace(FORMS["int4"], zeros=None)
    both = joined([FORMS["int4"], symmetric])
    assert isinstance(both, QuantizedWeight)
    assert both.dequantise()[150:].equal(symmetric.dequantise())


@pytest.mark.parametrize("kind", Quantization)
def test_slices_of_any_rank_are_slices_of_the_same_matrix(kind: Quantization) -> None:
    whole = quantise(matrix(7, 2 * INT4_GROUP + 13), kind)
    for first, last in [(0, 47), (47, 94), (94, 141)]:
        part = quantise(matrix(7, 2 * INT4_GROUP + 13), kind, (first, last))
        assert part.dequantise().equal(whole.dequantise()[:, first:last])


def test_quantising_errs_by_half_a_step() -> None:
    values = matrix(64, 130, seed=9)
    step = values.abs().amax(1, keepdim=True) / 127
    assert ((quantise(values, Quantization.INT8).dequantise() - values).abs() <= step / 2).all()
    fp8 = quantise(values, Quantization.FP8).dequantise()
    assert ((fp8 - values).abs() <= values.abs() / 16 + step * 127 / 448 / 512).all()
    int4 = quantise(values, Quantization.INT4)
    spread = values.amax() - values.amin()
    assert (int4.dequantise() - values).abs().max() <= spread / 15


def test_a_row_of_zeros_stays_zero() -> None:
    for kind in Quantization:
        assert quantise(torch.zeros(2, 70), kind).dequantise().abs().max() == 0
