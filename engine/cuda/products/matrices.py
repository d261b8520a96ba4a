"""Matrices in the forms that the GPU's kernels multiply: numbers, or codes in their order."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.config import Quantization
from engine.kernels.triton.coded import CODE_GROUP, CodedWeight, pair_codes, pair_words
from engine.kernels.triton.codes import channel_codes
from engine.model.weights import ModelWeights
from engine.quantization.at_load import quantise
from engine.quantization.weight import Encoding, QuantizedWeight, Weight, dense

Matrix = Tensor | CodedWeight

#: What products of codes divide outputs by.
_OUTPUTS = 128
#: Columns that a word of pairs may scale.
_PAIR_GROUPS = (32, 64, 128)
#: What share of the free memory e4m3 copies of pairs may take.
_COPY_SHARE = 4
#: Rows of an output head that become bytes at once, which takes many times their memory.
_HEAD_ROWS = 8192
#: The first generation of cards whose matrix units take e4m3.
_HOPPER = (9, 0)


def multiplies_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of codes run on this device, with activations of this type."""
    if device.type != "cuda":
        return dtype is torch.float16  # the interpreter, which has no products of bfloat16
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= _HOPPER


def device_matrix(weight: Weight) -> Matrix:
    """The form in which kernels multiply it: numbers where no kernel takes its codes."""
    if isinstance(weight, Tensor):
        return weight
    coded = _channels(weight) if weight.encoding is Encoding.FP8 else _pairs(weight)
    return dense(weight) if coded is None else coded


def with_copies(
    weights: ModelWeights[Matrix], free_bytes: int, at_load: str | None
) -> ModelWeights[Matrix]:
    """Keeps other forms of matrices beside them, each kind unless it takes more than a quarter of
    the free memory: signed bytes of the output head of a model that was quantised at load, for
    steps of few rows, and e4m3 copies of pairs for steps of more. Without the latter, which are two
    bytes for one, steps of dozens of rows make numbers of pairs in every program, and those of
    hundreds make the copies anew."""
    if at_load is not None and isinstance(weights.layers[0].qkv, CodedWeight):
        weights = replace(weights, head=_with_bytes(weights.head, free_bytes))
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += (layer.qkv, layer.out, layer.gate_up, layer.down)
    copies = sum(2 * x.codes.nbytes for x in matrices if isinstance(x, CodedWeight) and x.paired)
    if not copies or _COPY_SHARE * copies > free_bytes:
        return weights
    return weights.formed(_with_copy)


def _with_bytes(head: Matrix, free_bytes: int) -> Matrix:
    """An output head in numbers, and its signed bytes. e4m3 would cost more of a model's quality
    than all other matrices together."""
    if not isinstance(head, Tensor) or head.shape[0] % _OUTPUTS or head.shape[1] % CODE_GROUP:
        return head
    if _COPY_SHARE * head.numel() > free_bytes:
        return head
    parts = [quantise(rows, Quantization.INT8) for rows in head.split(_HEAD_ROWS)]
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts]).t().contiguous()
    return CodedWeight(codes=codes, scales=scales, takes_codes=False, numbers=head)


def _with_copy(matrix: Matrix) -> Matrix:
    if isinstance(matrix, Tensor) or not matrix.paired:
        return matrix
    return replace(matrix, channels=channel_codes(matrix))


def _channels(weight: QuantizedWeight) -> CodedWeight | None:
    """e4m3 codes with scales for each output, or for groups of columns, too."""
    n, k = weight.shape
    groups = weight.scales.shape[1]
    aligned = groups == 1 or (weight.group_size == CODE_GROUP and weight.offset == 0)
    if n % _OUTPUTS or k % CODE_GROUP or not aligned or not weight.quantizes_input:
        return None
    if weight.zeros is not None or weight.columns is not None:
        return None
    scales = weight.by_rows().scales.float().t().contiguous()
    blocks = weight.scales.float() if weight.row_block == CODE_GROUP else None
    return CodedWeight(codes=weight.codes, scales=scales, block_scales=blocks)


def _pairs(weight: QuantizedWeight) -> CodedWeight | None:
    """Numbers of 4 bits in pairs."""
    if weight.encoding is not Encoding.INT4 or weight.columns is not None:
        return None
    if weight.shape[0] % _OUTPUTS:
        return None
    group = next((g for g in reversed(_PAIR_GROUPS) if _fits(weight, g)), None)
    if group is None:
        return None
    scales = weight.by_column(weight.scales)[:, ::group].t().contiguous()
    zeros = torch.full_like(scales, weight.middle, dtype=torch.int8)
    if weight.zeros is not None:
        zeros = weight.by_column(weight.zeros)[:, ::group].t().contiguous()
    words, unit = pair_words(scales, zeros)
    largest = weight.dequantise(torch.float32).abs().amax(1).clamp_(min=1e-12)
    return CodedWeight(
        codes=pair_codes(weight.unpacked(), group),
        scales=words,
        unit=unit,
        channel_scales=(largest / 448.0)[None],
        takes_codes=False,
    )


def _fits(weight: QuantizedWeight, group: int) -> bool:
    """Whether every `group` columns of it share a scale, and pairs of such groups fill it."""
    k = weight.num_columns
    if k % (2 * group):
        return False
    one = weight.scales.shape[1] == 1
    return one or (weight.group_size % group == 0 and weight.offset % group == 0)
