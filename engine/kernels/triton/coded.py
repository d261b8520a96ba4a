"""Products' inputs and weights as codes, in the forms that kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Columns with a scale of their own in inputs of the products of few rows.
CODE_GROUP = 128
#: Rows of the table of such scales.
SCALE_ROWS = 128
#: Rows of large scaled products come in multiples of this.
_ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRows:
    """Inputs `[m, k]` of a product as e4m3 codes.

    scales: float32. Of the products of few rows `[groups, SCALE_ROWS]`, one for each group of
    k / groups columns and row; of large ones `[1, m]`, one for each row, or `[groups, m]`.
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def grouped(rows: int, k: int, device: torch.device) -> CodedRows:
        """Room for those of a product of few rows."""
        return CodedRows(
            codes=torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=device),
            scales=torch.empty(k // CODE_GROUP, SCALE_ROWS, dtype=torch.float32, device=device),
        )

    @staticmethod
    def many(rows: int, k: int, device: torch.device, groups: int = 1) -> CodedRows:
        """Room for those of a large product, whose rows are padded."""
        padded = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
        return CodedRows(
            codes=torch.empty(padded, k, dtype=torch.float8_e4m3fn, device=device),
            scales=torch.empty(groups, padded, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.codes.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A product `[m, n]` of codes, to be multiplied yet by the scales of its inputs' rows, float32
    `[1, m]`, and of the weights' outputs `[1, n]`, by the kernel that reads it."""

    values: Tensor
    row_scales: Tensor
    channel_scales: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWeight:
    """A matrix W `[n, k]` of a product x W^T as codes.

    codes: e4m3 or int8 `[n, k]`; or uint8 `[n, k / 2]`, pairs of numbers of 4 bits: for groups of g
    columns, byte i g + j of a row holds column j of group 2 i in its low half and column j of group
    2 i + 1 in its high half.
    scales: float32 `[1, n]`, or of e4m3 `[groups, n]` for groups of CODE_GROUP columns; of pairs
    words, int32 `[groups, n]`: a float16 scale in units of `unit` in the high half, in the low one
    the bfloat16 128 + zero point.
    channel_scales: of pairs float32 `[1, n]`, scales for each output with which the matrix becomes
    e4m3 for many rows.
    block_scales: of e4m3 with groups, float32 `[n / 128, groups]` where 128 rows share each scale.
    takes_codes: whether inputs of few rows become e4m3 codes, too; those of many rows always do.
    channels: of pairs, the same matrix in e4m3 with `channel_scales`, where it is kept.
    numbers: of int8, the matrix that they stand for, which multiplies many rows.
    """

    codes: Tensor
    scales: Tensor
    unit: float = 1.0
    channel_scales: Tensor | None = None
    block_scales: Tensor | None = None
    takes_codes: bool = True
    channels: CodedWeight | None = None
    numbers: Tensor | None = None

    @property
    def paired(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.dtype is torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, width = self.codes.shape
        return n, width * (1 + self.paired)

    @property
    def by_channel(self) -> bool:
        """Whether it is e4m3 with one scale for each output."""
        return self.codes.dtype is torch.float8_e4m3fn and self.scales.shape[0] == 1

    @property
    def by_block(self) -> bool:
        """Whether the library multiplies it with inputs that have a scale for each group, too. It
        silently gives wrong results where the groups are no multiple of four."""
        return self.block_scales is not None and self.scales.shape[0] % 4 == 0

    @property
    def group(self) -> int:
        """Columns of one scale."""
        return self.shape[1] // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.codes.nbytes + self.scales.nbytes


def pair_codes(codes: Tensor, group: int) -> Tensor:
    """uint8 `[n, k / 2]` of `CodedWeight` from numbers of 4 bits, uint8 `[n, k]`; 2 * group divides
    k."""
    n, k = codes.shape
    halves = codes.view(n, k // (2 * group), 2, group)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(n, k // 2)


def pair_words(scales: Tensor, zeros: Tensor) -> tuple[Tensor, float]:
    """The words of `CodedWeight` for scales and zero points `[groups, n]`, and their unit.

    Scales of bfloat16 and float16 are kept exactly down to 2^-24 of the largest: the unit is a
    power of two.
    """
    largest = float(scales.max())
    unit = 2.0 ** (math.frexp(largest)[1] - 10) if largest > 0.0 else 1.0
    high = (scales.float() / unit).half().view(torch.int16).int() << 16
    low = (zeros.float() + 128.0).bfloat16().view(torch.int16).int()
    return high | low, unit
