"""Quantises matrices of an unquantised checkpoint while they load: to nearest, no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import Quantization
from engine.quantization.weight import Encoding, QuantizedWeight, pack_nibbles

_E4M3_MAX = 448.0
_INT8_MAX = 127.0
#: Columns that share a scale of INT4.
INT4_GROUP = 64


def quantise(
    matrix: Tensor, kind: Quantization, columns: tuple[int, int] | None = None
) -> QuantizedWeight:
    """The columns `columns` of the quantised `[N, K]` matrix.

    Scales are those of whole rows and of groups from column 0 on, so that ranks of every
    tensor-parallel degree hold slices of the same matrix.
    """
    values = matrix.float()
    first, last = columns or (0, matrix.shape[1])
    if kind is Quantization.INT4:
        codes, scales, zeros = _int4(values)
        groups = slice(first // INT4_GROUP, -(-last // INT4_GROUP))
        return QuantizedWeight(
            encoding=Encoding.INT4,
            codes=pack_nibbles(codes[:, first:last]),
            scales=scales[:, groups].to(matrix.dtype).contiguous(),
            zeros=zeros[:, groups].contiguous(),
            group_size=INT4_GROUP,
            offset=first % INT4_GROUP,
            num_inputs=last - first,
            dtype=matrix.dtype,
            quantizes_input=True,
        )
    largest, encoding = (
        (_E4M3_MAX, Encoding.FP8) if kind is Quantization.FP8 else (_INT8_MAX, Encoding.INT8)
    )
    scales = (values.abs().amax(1, keepdim=True) / largest).clamp_(min=1e-12)
    codes = values / scales
    codes = codes.to(torch.float8_e4m3fn) if kind is Quantization.FP8 else codes.round().char()
    return QuantizedWeight(
        encoding=encoding,
        codes=codes[:, first:last].contiguous(),
        scales=scales,
        group_size=matrix.shape[1],
        num_inputs=last - first,
        dtype=matrix.dtype,
        quantizes_input=True,
    )


def _int4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[N, K]`, scales and zero points `[N, groups]`: the codes of a group span its weights.
    To clip the largest would bring the others nearer, but measured no better."""
    rows, width = values.shape
    missing = -width % INT4_GROUP
    # The last group is filled with its own last weight, which changes no span.
    padded = torch.cat((values, values[:, -1:].expand(rows, missing)), 1) if missing else values
    groups = padded.unflatten(1, (-1, INT4_GROUP))
    low = groups.amin(-1, keepdim=True).clamp_(max=0.0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0.0)
    scales = ((high - low) / 15).clamp_(min=1e-12)
    scales = scales.to(torch.bfloat16).float()  # as the narrowest model stores them
    zeros = (-low / scales).round_().clamp_(0, 15)
    codes = (groups / scales).round_().add_(zeros).clamp_(0, 15)
    return codes.flatten(1)[:, :width].byte(), scales[..., 0], zeros[..., 0].char()
