"""One quantised matrix, in the layout that every checkpoint format is brought to at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor


class Encoding(StrEnum):
    """What a code is."""

    FP8 = "fp8"  # float8_e4m3fn
    INT8 = "int8"  # signed
    INT4 = "int4"  # 0 .. 15


#: The zero point of codes without zero points of their own.
_MIDDLE = {Encoding.FP8: 0, Encoding.INT8: 0, Encoding.INT4: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix W `[N, K]` of a product x W^T.

    The value at (n, k) is (code[n, k] - zero) * scale, with the scale and the zero point of row
    n // row_block and column (k + offset) // group_size.

    codes: FP8 float8_e4m3fn and INT8 int8 `[N, K]`; INT4 uint8 `[N, ceil(K / 2)]`, even columns in
        the low nibbles.
    scales: a floating type `[ceil(N / row_block), G]`, used as float32; one column for a whole row
        where scales are per channel (group_size is at least offset + K then).
    zeros: int8, shaped like `scales`; None for symmetric codes: 0, or 8 for INT4.
    row_block: rows that share a row of scales.
    offset: columns of the first group that a slice by rank left out.
    columns: int64 `[K]`, the input of each column where the checkpoint orders columns by their
        importance: the product is x[:, columns] W^T. Columns of padding have the value 0.
    num_inputs: width of x; K unless there are `columns`. dtype: of x, and of the matrix that this
        one stands for.
    input_scale: float32 scalar, the fixed scale of quantised inputs; None: they have scales of
        their own, or stay as they are.
    quantizes_input: whether the format lets the product quantise its inputs too.
    """

    encoding: Encoding
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int
    row_block: int = 1
    offset: int = 0
    columns: Tensor | None = None
    num_inputs: int
    dtype: torch.dtype
    input_scale: Tensor | None = None
    quantizes_input: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, width of x), as the matrix would have it."""
        return self.codes.shape[0], self.num_inputs

    @property
    def num_columns(self) -> int:
        """K: columns of codes."""
        return self.num_inputs if self.columns is None else self.columns.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.codes, self.scales, self.zeros, self.columns)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def middle(self) -> int:
        """The zero point of all codes where `zeros` is None."""
        return _MIDDLE[self.encoding]

    def unpacked(self) -> Tensor:
        """Codes `[N, K]` one to an element: float8_e4m3fn, int8 or (INT4) uint8."""
        if self.encoding is Encoding.INT4:
            return unpack_nibbles(self.codes, self.num_columns)
        return self.codes

    def by_column(self, table: Tensor) -> Tensor:
        """`scales` or `zeros` for each row and column: `[N, K]`."""
        index = torch.arange(self.num_columns, device=self.device) + self.offset
        return self._by_row(table)[:, index // self.group_size]

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix `[N, num_inputs]`; computed in float32, rounded once."""
        values = self.unpacked().float()
        if self.zeros is not None:
            values -= self.by_column(self.zeros)
        elif self.middle:
            values -= self.middle
        values *= self.by_column(self.scales.float())
        if self.columns is not None:
            whole = values.new_zeros(self.shape)
            values = whole.index_add_(1, self.columns, values)  # padding adds zeros
        return values.to(dtype or self.dtype)

    def take(self, rows: Tensor) -> QuantizedWeight:
        """The rows with these numbers, in this order."""
        flat = self.by_rows()
        return replace(
            flat,
            codes=flat.codes.view(torch.uint8)[rows].view(self.codes.dtype),
            scales=flat.scales[rows],
            zeros=None if flat.zeros is None else flat.zeros[rows],
        )

    def split_rows(self, first: int) -> tuple[QuantizedWeight, QuantizedWeight]:
        """The rows before `first`, and the others."""
        whole = self if first % self.row_block == 0 else self.by_rows()
        cut = first // whole.row_block
        zeros = (None, None) if whole.zeros is None else (whole.zeros[:cut], whole.zeros[cut:])
        return (
            replace(whole, codes=whole.codes[:first], scales=whole.scales[:cut], zeros=zeros[0]),
            replace(whole, codes=whole.codes[first:], scales=whole.scales[cut:], zeros=zeros[1]),
        )

    def padded(self, num_rows: int) -> QuantizedWeight:
        """With rows of value 0 behind it, so many in all."""
        flat, missing = self.by_rows(), num_rows - self.codes.shape[0]
        if missing == 0:
            return self
        return replace(
            flat,
            codes=_with_zero_rows(flat.codes, missing),
            scales=_with_zero_rows(flat.scales, missing),
            zeros=None if flat.zeros is None else _with_zero_rows(flat.zeros, missing),
        )

    def scaled(self, factor: float) -> QuantizedWeight:
        """The matrix times `factor`."""
        return self if factor == 1.0 else replace(self, scales=self.scales.float() * factor)

    def by_rows(self) -> QuantizedWeight:
        """The same matrix with a row of scales for each of its rows."""
        if self.row_block == 1:
            return self
        zeros = None if self.zeros is None else self._by_row(self.zeros)
        return replace(self, scales=self._by_row(self.scales), zeros=zeros, row_block=1)

    def _by_row(self, table: Tensor) -> Tensor:
        if self.row_block == 1:
            return table
        return table.repeat_interleave(self.row_block, 0)[: self.codes.shape[0]].contiguous()


Weight = Tensor | QuantizedWeight


def dense(weight: Weight) -> Tensor:
    """The matrix as a tensor; one that is not quantised stays as it is."""
    return weight if isinstance(weight, Tensor) else weight.dequantise()


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """The first half of the rows, and the second."""
    if isinstance(weight, QuantizedWeight):
        return weight.split_rows(weight.shape[0] // 2)
    first, second = weight.chunk(2)
    return first, second


def joined(parts: Sequence[Weight]) -> Weight:
    """Matrices of the same input, one below the other; a tensor where their forms differ so that
    no quantised form has them all."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantised) < len(parts) or not all(_alike(quantised[0], part) for part in quantised):
        return torch.cat([dense(part) for part in parts])
    block = quantised[0].row_block
    aligned = all(part.codes.shape[0] % block == 0 for part in quantised[:-1])
    if not aligned or any(part.row_block != block for part in quantised):
        quantised = [part.by_rows() for part in quantised]
    first = quantised[0]
    return replace(
        first,
        codes=_stacked([part.codes for part in quantised]),
        scales=_stacked_scales(quantised),
        zeros=_stacked_zeros(quantised),
        input_scale=_shared_input_scale(quantised),
        quantizes_input=all(part.quantizes_input for part in quantised),
    )


def _alike(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether columns and groups of both lie alike."""
    if first.columns is None or other.columns is None:
        same_columns = first.columns is other.columns
    else:
        same_columns = torch.equal(first.columns, other.columns)
    return (
        same_columns
        and first.encoding is other.encoding
        and first.num_inputs == other.num_inputs
        and first.scales.shape[1] == other.scales.shape[1]
        and (first.scales.shape[1] == 1 or first.group_size == other.group_size)
        and first.offset == other.offset
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    # Not every torch concatenates float8: its bytes are.
    kind = tensors[0].dtype
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(kind)


def _stacked_scales(parts: list[QuantizedWeight]) -> Tensor:
    kinds = {part.scales.dtype for part in parts}
    if len(kinds) == 1:
        return torch.cat([part.scales for part in parts])
    return torch.cat([part.scales.float() for part in parts])


def _stacked_zeros(parts: list[QuantizedWeight]) -> Tensor | None:
    if all(part.zeros is None for part in parts):
        return None
    return torch.cat(
        [
            torch.full_like(part.scales, part.middle, dtype=torch.int8)
            if part.zeros is None
            else part.zeros
            for part in parts
        ]
    )


def _shared_input_scale(parts: list[QuantizedWeight]) -> Tensor | None:
    """Inputs are quantised once for all parts: by the largest of their scales, which clips none."""
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    return torch.stack(scales).max() if len(scales) == len(parts) else None


def _with_zero_rows(table: Tensor, count: int) -> Tensor:
    padding = torch.zeros(count, table.shape[1], dtype=torch.uint8, device=table.device)
    if table.element_size() == 1:
        return torch.cat((table.view(torch.uint8), padding)).view(table.dtype)
    return torch.cat((table, padding.to(table.dtype)))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 .. 15 `[N, K]`, two to a byte, `[N, ceil(K / 2)]`: the low nibble holds the even
    column, the last high nibble may be unused."""
    codes = codes.to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.cat((codes, codes.new_zeros(codes.shape[0], 1)), 1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


def unpack_nibbles(packed: Tensor, num_columns: int) -> Tensor:
    """The inverse: uint8 codes `[N, num_columns]`."""
    both = torch.stack((packed & 15, packed >> 4), -1)
    return both.flatten(1)[:, :num_columns].contiguous()
