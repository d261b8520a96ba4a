"""FP8 and INT8 matrices whose codes lie as the matrix does, an element each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.formats.stated import MatrixFormat
from engine.model.formats.tensors import ModuleTensors
from engine.model.sharding import Span
from engine.quantization.weight import Encoding, QuantizedWeight


def read_scaled(
    tensors: ModuleTensors,
    kind: MatrixFormat,
    shape: tuple[int, int],
    rows: Span,
    columns: Span,
    dtype: torch.dtype,
) -> QuantizedWeight:
    """Rows and columns of the matrix of a module, whose whole shape must be `shape`."""
    encoding = Encoding.FP8 if kind.floating else Encoding.INT8
    codes = tensors.read("weight", shape, rows, columns)
    if kind.floating and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise tensors.fault("weight", "has codes that are not numbers: it is damaged")
    scale = "weight_scale_inv" if tensors.kind("weight_scale_inv") else "weight_scale"
    row_block, group = kind.block or (1, kind.group_size or shape[1])
    lookup = _Table(tensors, shape, rows, columns, row_block, group)
    scales = lookup.read(scale, tensors.scales)
    zeros = None if kind.symmetric else lookup.read("weight_zero_point", tensors.read)
    input_scale, quantizes = _input_scale(tensors, kind)
    weight = QuantizedWeight(
        encoding=encoding,
        codes=codes,
        scales=scales,
        zeros=None if zeros is None else zeros.char(),
        group_size=group,
        row_block=lookup.row_block,
        offset=columns[0] % group if scales.shape[1] > 1 else 0,
        num_inputs=columns[1] - columns[0],
        dtype=dtype,
        input_scale=input_scale,
        quantizes_input=quantizes,
    )
    return weight


class _Table:
    """Reads the part of a module's scales, or zero points, that a slice of its matrix needs."""

    def __init__(
        self,
        tensors: ModuleTensors,
        shape: tuple[int, int],
        rows: Span,
        columns: Span,
        row_block: int,
        group: int,
    ) -> None:
        self._tensors = tensors
        self._rows, self._columns = rows, columns
        self._block, self._group = row_block, group
        self._whole = -(-shape[0] // row_block), -(-shape[1] // group)
        #: Rows of the slice that share a row of what `read` returns.
        self.row_block = row_block if rows[0] % row_block == 0 else 1

    def read(self, name: str, reader: Any) -> Tensor:
        found = self._tensors.shape(name)
        first, last = self._rows
        if self._whole[1] == 1 and self._block == 1 and found in ((), (1,), (1, 1)):
            one: Tensor = reader(name, found)
            return one.reshape(1, 1).expand(last - first, 1).contiguous()
        if self._whole[1] == 1 and len(found) == 1:
            row: Tensor = reader(name, self._whole[:1], (first, last))
            return row[:, None].contiguous()
        blocks = first // self._block, -(-last // self._block)
        groups = self._columns[0] // self._group, -(-self._columns[1] // self._group)
        table: Tensor = reader(name, self._whole, blocks, groups)
        if self.row_block == self._block:
            return table
        numbers = torch.arange(first, last, device=table.device) // self._block - blocks[0]
        return table[numbers]


def _input_scale(tensors: ModuleTensors, kind: MatrixFormat) -> tuple[Tensor | None, bool]:
    """The stored scale of inputs, and whether products quantise them; not where codes of inputs
    have a zero point."""
    if not kind.static_input:
        return None, kind.quantizes_input
    if tensors.kind("input_zero_point"):
        zero = tensors.read("input_zero_point", tensors.shape("input_zero_point"))
        if bool((zero != 0).any()):
            return None, False
    scale = tensors.scales("input_scale", tensors.shape("input_scale")).float().flatten()
    if scale.shape != (1,) or float(scale) == 0.0:
        raise tensors.fault("input_scale", "must be one positive number")
    return scale[0], True
