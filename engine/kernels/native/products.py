"""Weights in the panels that the products of kernels.cpp and quantized.h take, with those calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.native.build import ProductParts, ScaleGroups
from engine.quantization.weight import Encoding, QuantizedWeight, Weight, joined

PANEL = 32  # outputs of one panel
INPUT_GROUP = 64  # inputs that share a scale where they are quantised


class Threads:
    """Number of threads of the calls of one engine."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()


class PackedProduct:
    """Packed weights with the function that multiplies rows by them. outputs, inputs: of the
    product. prepared: what the inputs go through first."""

    def __init__(
        self,
        function: Any,
        threads: Threads,
        weight: Tensor,
        tables: tuple[Any, ...],
        shape: tuple[int, int],
        prepared: Callable[[Tensor], Tensor] = Tensor.contiguous,
        *,
        bits: int = 16,
    ) -> None:
        """`tables`: further arguments, pointers that `tables` keep alive included. `bits`: of a
        weight."""
        self._function = function
        self._threads = threads
        self.weight = weight
        self._tables = tables
        self._outputs, self._inputs = shape
        self._prepared = prepared
        self._bits = bits

    def parts(self, first: Tensor | None, second: Tensor | None) -> ProductParts | None:
        """The product with its biases for `baton_layers`; None if its inputs go through more."""
        if self._prepared is not Tensor.contiguous:
            return None
        return ProductParts(
            *(self._bits, self.weight.data_ptr(), *map(_argument, self._tables or (None,))),
            *(self._inputs, self._outputs, _argument(first), _argument(second)),
        )

    def run(self, x: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
        """Rows of x times the weights, with the two tensors that the function adds."""
        x = self._prepared(x)
        out = x.new_empty(x.shape[0], self._outputs)
        self._function(
            *(x.data_ptr(), x.shape[0], self._inputs, self.weight.data_ptr()),
            *(_argument(table) for table in self._tables),
            *(self._outputs, _argument(first), _argument(second), out.data_ptr()),
            self._threads.count,
        )
        return out


def serves(weight: Weight) -> bool:
    """Whether `product` has a form for this weight as it is."""
    if isinstance(weight, Tensor):
        return weight.shape[1] % 2 == 0  # panels hold inputs in pairs
    if weight.encoding is Encoding.INT8:
        plain = weight.columns is None and weight.zeros is None and weight.scales.shape[1] == 1
        return plain and weight.quantizes_input
    if weight.encoding is Encoding.INT4:
        one = weight.scales.shape[1] == 1
        return (one or weight.group_size % 4 == 0) and _short(weight.scales) is not None
    return False


def product(library: ctypes.CDLL, threads: Threads, weight: Weight) -> PackedProduct:
    """The product x W^T."""
    return _product(library, "linear", threads, weight, weight.shape)


def gated_product(
    library: ctypes.CDLL, threads: Threads, gate: Weight, up: Weight
) -> PackedProduct:
    """The product silu(x gate^T) * (x up^T)."""
    return _product(library, "gated", threads, _interleaved(gate, up), gate.shape)


def _product(
    library: ctypes.CDLL, name: str, threads: Threads, weight: Weight, shape: Any
) -> PackedProduct:
    if isinstance(weight, Tensor):
        function, packed = getattr(library, f"baton_{name}"), _packed(library, weight)
        return PackedProduct(function, threads, packed, (), tuple(shape))
    function = getattr(library, f"baton_{name}_{weight.encoding}")
    weight = weight.by_rows().padded(-(-weight.shape[0] // PANEL) * PANEL)
    if weight.encoding is Encoding.INT8:
        tables = (weight.scales[:, 0].float().contiguous(),)
        return PackedProduct(function, threads, _bytes(weight.codes), tables, tuple(shape), bits=8)
    return _product4(function, threads, weight, shape[0])


def _product4(
    function: Any, threads: Threads, weight: QuantizedWeight, outputs: int
) -> PackedProduct:
    """Inputs are filled up to whole groups, from their offset in the first."""
    width = weight.num_columns
    one = weight.scales.shape[1] == 1
    size = -(-width // 4) * 4 if one else weight.group_size
    before = 0 if one else weight.offset
    after = -(width + before) % size
    scales = _short(weight.scales)
    assert scales is not None
    scales = _by_panel(scales)
    zeros = None if weight.zeros is None else _by_panel(weight.zeros - weight.middle)
    half = int(scales.dtype is torch.float16)
    inputs = _input_group(size) if weight.quantizes_input else 0
    groups = ScaleGroups(size, scales.data_ptr(), _argument(zeros), half, inputs)
    codes = functional.pad(weight.unpacked(), (before, after))

    def prepared(x: Tensor) -> Tensor:
        if weight.columns is not None:
            x = x.index_select(1, weight.columns)
        if before or after:
            x = functional.pad(x, (before, after))
        return x.contiguous()

    plain = weight.columns is None and not before and not after
    return PackedProduct(
        function,
        threads,
        _words(codes),
        (_Kept(groups, scales, zeros),),
        (outputs, codes.shape[1]),
        Tensor.contiguous if plain else prepared,
        bits=4,
    )


def _input_group(size: int) -> int:
    """Columns of an input's scale where those of a weight's are `size`; 0: inputs stay as they
    are."""
    if size % INPUT_GROUP == 0:
        return INPUT_GROUP
    return size if size < INPUT_GROUP else 0


class _Kept:
    """A structure with the tensors that it points to."""

    def __init__(self, structure: ctypes.Structure, *tensors: Tensor | None) -> None:
        self._structure = structure
        self._tensors = tensors

    def data_ptr(self) -> int:
        return ctypes.addressof(self._structure)


def _argument(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _short(scales: Tensor) -> Tensor | None:
    """Scales in the 16-bit type that has them all exactly; None: neither has."""
    whole = scales.float()
    for kind in (torch.float16, torch.bfloat16):
        if whole.to(kind).float().equal(whole):
            return whole.to(kind)
    return None


def _packed(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    out = torch.empty(-(-outputs // PANEL), inputs // 2, PANEL, 2, dtype=weight.dtype)
    library.baton_pack(weight.data_ptr(), outputs, inputs, out.data_ptr())
    return out


def _bytes(codes: Tensor) -> Tensor:
    """int8 codes `[N, K]` plus 128 as `[N / 32, K / 4, 32, 4]`; zeros fill the last group."""
    codes = functional.pad(codes, (0, -codes.shape[1] % INPUT_GROUP))
    panels: Tensor = (
        (codes ^ -128).view(torch.uint8).unflatten(0, (-1, PANEL)).unflatten(2, (-1, 4))
    )
    return panels.transpose(1, 2).contiguous()


def _words(codes: Tensor) -> Tensor:
    """Codes 0 .. 15 `[N, K]` as the 16-bit words of quantized.h: `[N / 32, K / 4, 32]`."""
    parts = codes.int().unflatten(0, (-1, 2, PANEL // 2)).unflatten(3, (-1, 2, 2))
    # From (panel, half, output, quad, pair, column): a word for each (output, column).
    parts = parts.permute(0, 3, 2, 5, 4, 1).flatten(4).flatten(2, 3)
    words = (parts << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).short().contiguous()


def _by_panel(table: Tensor) -> Tensor:
    """`[N, G]` as `[N / 32, G, 32]`."""
    panels: Tensor = table.unflatten(0, (-1, PANEL))
    return panels.transpose(1, 2).contiguous()


def _interleaved(first: Weight, second: Weight) -> Weight:
    """Sixteen outputs of one weight, sixteen of the other, in turn; zeros fill the last."""
    half = PANEL // 2
    rows = -(-first.shape[0] // half) * half
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        parts = [
            functional.pad(weight, (0, 0, 0, rows - len(weight))) for weight in (first, second)
        ]
        return torch.stack([part.unflatten(0, (-1, half)) for part in parts], 1).flatten(0, 2)
    both = joined([first.padded(rows), second.padded(rows)])
    assert isinstance(both, QuantizedWeight)
    return both.take(torch.arange(2 * rows).view(2, -1, half).transpose(0, 1).flatten())
