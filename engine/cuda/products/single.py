"""One rank's products with weights in codes, of any number of rows.

Of few rows: the engine's own kernel, which reads the codes once. Of many: the library's product of
e4m3 codes, for which pairs of 4-bit numbers become e4m3 first; weights with scales for blocks
become numbers. Inputs become codes as the product wants them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.cuda.products.matrices import Matrix
from engine.kernels.activation import Activation
from engine.kernels.triton.coded import CodedRows, CodedWeight, Sums
from engine.kernels.triton.codes import (
    channel_codes,
    coded_product,
    coded_sums,
    group_numbers,
    row_codes,
)
from engine.kernels.triton.split_linear import (
    NextInput,
    fits,
    scratch_for,
    shape_for,
    split_linear,
)
from engine.model.weights import ModelWeights

#: Up to so many rows pairs are multiplied as they are, although there is an e4m3 copy: making
#: numbers of pairs costs more with every further row that it leaves fewer registers for.
PAIR_ROWS = 16
#: The same of signed bytes, and the numbers that they stand for.
BYTE_ROWS = 32


def matrices_of(weights: ModelWeights[Matrix]) -> Iterable[tuple[Matrix, bool]]:
    """All matrices, each with whether its product is gated."""
    for layer in weights.layers:
        yield layer.gate_up, True
        for matrix in (layer.qkv, layer.out, layer.down):
            yield matrix, False
    yield weights.head, False


def form_for(rows: int, weight: Matrix) -> Matrix:
    """The form of a matrix that multiplies so many rows: pairs few, their e4m3 copy more; signed
    bytes few, their numbers more."""
    if isinstance(weight, Tensor):
        return weight
    if weight.channels is not None and rows > PAIR_ROWS:
        return weight.channels
    if weight.numbers is not None and rows > BYTE_ROWS:
        return weight.numbers
    return weight


def takes_one_row(weight: Matrix) -> bool:
    """Whether the kernel of one row does products with it."""
    return isinstance(weight, Tensor) or weight.scales.shape[0] == 1 or weight.paired


def takes_codes(weight: Matrix) -> bool:
    """Whether few rows are to become codes for it."""
    return isinstance(weight, CodedWeight) and weight.takes_codes


def multiplies_many(weight: Matrix) -> bool:
    """Whether products of many rows with it are of e4m3 codes."""
    if isinstance(weight, Tensor):
        return False
    return weight.paired or weight.by_channel or weight.by_block


def many_room(rows: int, weight: Matrix, device: torch.device) -> CodedRows:
    """Where the codes of many rows for a product with `weight` are to be left."""
    groups = weight.scales.shape[0] if isinstance(weight, CodedWeight) and weight.by_block else 1
    return CodedRows.many(rows, weight.shape[1], device, groups)


def _distinct(matrices: Iterable[tuple[Matrix, bool]]) -> Iterable[tuple[Matrix, bool]]:
    """One of each size and form, copies included."""
    seen: dict[tuple[object, ...], tuple[Matrix, bool]] = {}
    for kept, gated in matrices:
        for matrix in (kept, form_for(PAIR_ROWS + 1, kept), form_for(BYTE_ROWS + 1, kept)):
            group = matrix.group if isinstance(matrix, CodedWeight) else 0
            seen.setdefault((tuple(matrix.shape), type(matrix), group, gated), (matrix, gated))
    return seen.values()


class SplitProducts:
    """Products of few rows on the engine's own kernel; one at a time uses its scratch."""

    def __init__(
        self, weights: ModelWeights[Matrix], max_rows: int, device: torch.device, *, pdl: bool
    ) -> None:
        self.max_rows = max_rows if fits(device) else 0
        self._pdl = pdl
        self._scratch = scratch_for(device, max(1, max_rows), _distinct(matrices_of(weights)))

    def can(self, rows: int, weight: Matrix, *, gated: bool = False) -> bool:
        """Whether the kernel does such a product."""
        return rows <= self.max_rows and shape_for(rows, weight, gated=gated) is not None

    def room(self, rows: int, weight: Matrix, like: Tensor) -> Tensor | CodedRows:
        """Where the input of a product with `weight` is to be left."""
        k = weight.shape[1]
        if takes_codes(weight):
            return CodedRows.grouped(rows, k, like.device)
        return like.new_empty(rows, k)

    def input_for(self, x: Tensor, weight: Matrix) -> Tensor | CodedRows:
        """x as a product with `weight` takes it."""
        if not takes_codes(weight):
            return x
        codes = CodedRows.grouped(x.shape[0], x.shape[1], x.device)
        row_codes(x, out=codes, pdl=self._pdl)
        return codes

    def __call__(
        self,
        x: Tensor | CodedRows,
        weight: Matrix,
        *,
        out: Tensor | CodedRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        following: NextInput | None = None,
        gated: bool = False,
        activation: Activation = Activation.SILU,
    ) -> None:
        """See `engine.kernels.triton.split_linear`."""
        shape = shape_for(x.shape[0], weight, gated=gated)
        assert shape is not None
        split_linear(
            x,
            weight,
            self._scratch,
            shape,
            out=out,
            bias=bias,
            residual=residual,
            squares=squares,
            eps=eps,
            following=following,
            gated=gated,
            activation=activation,
            pdl=self._pdl,
        )


class CodedProducts:
    """Products with coded weights that are not fused with what stands around them."""

    def __init__(self, split: SplitProducts, dtype: torch.dtype, *, pdl: bool) -> None:
        self.split = split
        self._dtype = dtype
        self._pdl = pdl

    def product(
        self,
        x: Tensor,
        weight: CodedWeight,
        *,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """out = x weight^T + bias + residual; the residual may be `out` itself."""
        few = form_for(x.shape[0], weight)
        if isinstance(few, CodedWeight) and self.split.can(x.shape[0], few):
            rows = self.split.input_for(x, few)
            self.split(rows, few, out=out, bias=bias, residual=residual)
            return
        if weight.numbers is not None:
            assert bias is None, "of an output head"
            assert residual is None
            torch.mm(x, weight.numbers.t(), out=out)
            return
        many = self.many(self.codes(x, weight), weight, bias)[: x.shape[0]]
        if residual is None:
            out.copy_(many)
        else:
            torch.add(many, residual, out=out)

    def codes(self, x: Tensor, weight: CodedWeight) -> CodedRows | Tensor:
        """Many rows as a product with `weight` takes them."""
        if not multiplies_many(weight):
            return x
        codes = many_room(x.shape[0], weight, x.device)
        row_codes(x, out=codes, pdl=self._pdl)
        return codes

    def sums(self, x: CodedRows, weight: CodedWeight, one: Tensor) -> Sums:
        """x weight^T of many rows, for a kernel that scales it; the weights have scales for each
        output, or are pairs. one: the float32 1."""
        channels = channel_codes(weight) if weight.paired else weight
        return coded_sums(x, channels, one, self._dtype)

    def many(
        self,
        x: CodedRows | Tensor,
        weight: CodedWeight,
        bias: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x weight^T + bias of many rows, with those of padding behind them; in `out`, if any."""
        if isinstance(x, Tensor):
            return torch.nn.functional.linear(x, group_numbers(weight, x.dtype), bias)
        channels = channel_codes(weight) if weight.paired else weight
        if out is None:
            size = x.shape[0], weight.shape[0]
            out = torch.empty(size, dtype=self._dtype, device=x.codes.device)
        coded_product(x, channels, out=out, bias=bias)
        return out
