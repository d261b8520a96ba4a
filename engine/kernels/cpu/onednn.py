"""Linear products on weights packed for oneDNN: on CPUs with bfloat16 1.5 to 3 times a plain one.

These are the operators that torch's own compiler emits for such products. They have no public name,
so they are looked up, and where they are missing nothing is packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS_HINT = 16  # rows of x that the packed layout is chosen for; others work as well


def _operator(name: str) -> Any:
    return getattr(torch.ops.mkldnn, name, None)


_supported = _operator("_is_mkldnn_bf16_supported")
_pack = _operator("_reorder_linear_weight")
_product = _operator("_linear_pointwise")


def packs(dtype: torch.dtype) -> bool:
    """Whether packed products exist here and pay: bfloat16 only, float32 gains nothing."""
    if dtype is not torch.bfloat16 or None in (_supported, _pack, _product):
        return False
    return torch.backends.mkldnn.is_available() and bool(_supported())


class PackedLinear:
    """The product x W^T + b, the sum with a residual fused into it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = _pack(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`."""
        out: Tensor = _product(x, self.weight, self._bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum residual + x W^T + b."""
        out: Tensor = _product.binary(x, residual, self.weight, self._bias, "add")
        return out


class PackedGated:
    """The gated product silu(x gate^T + b) * (x up^T + b), silu and the product fused."""

    def __init__(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> None:
        self.gate: Tensor = _pack(gate, _ROWS_HINT)
        self.up: Tensor = _pack(up, _ROWS_HINT)
        self._gate_bias = gate_bias
        self._up_bias = up_bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, I]`."""
        gate = _product(x, self.gate, self._gate_bias, "swish", [], "")
        out: Tensor = _product.binary(x, gate, self.up, self._up_bias, "mul")
        return out
