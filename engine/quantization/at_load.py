"""Quantises matrices of an unquantised checkpoint while they load: to nearest, no calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import Quantization
from engine.quantization.nibbles import pack_nibbles
from engine.quantization.weight import Encoding, QuantizedWeight

_E4M3_MAX = 448.0
_INT8_MAX = 127.0
#: Columns that share a scale of INT4.
INT4_GROUP = 64
#: Shares of a group's range that its 4-bit codes may span: the rest is clipped where that brings
#: the group nearer to its weights.
_SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


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
    """Codes `[N, K]`, scales and zero points `[N, groups]`: of each group the span of codes with
    the smallest squared error."""
    rows, width = values.shape
    missing = -width % INT4_GROUP
    # The last group is filled with its own last weight, which no span loses by.
    padded = torch.cat((values, values[:, -1:].expand(rows, missing)), 1) if missing else values
    groups = padded.unflatten(1, (-1, INT4_GROUP))
    low = groups.amin(-1, keepdim=True).clamp_(max=0.0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0.0)
    best = [torch.zeros_like(groups), low, low]
    least = torch.full_like(low, torch.inf)
    for span in _SPANS:
        scale = ((high - low) * (span / 15)).clamp_(min=1e-12)
        scale = scale.to(torch.bfloat16).float()  # as the narrowest model stores it
        zero = (-low * span / scale).round_().clamp_(0, 15)
        codes = (groups / scale).round_().add_(zero).clamp_(0, 15)
        error = ((codes - zero) * scale - groups).pow_(2).sum(-1, keepdim=True)
        better = error < least
        pairs = zip((codes, scale, zero), best, strict=True)
        best = [torch.where(better, new, old) for new, old in pairs]
        least = torch.minimum(least, error)
    codes, scale, zero = best
    return codes.flatten(1)[:, :width].byte(), scale[..., 0], zero[..., 0].char()
