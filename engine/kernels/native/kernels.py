"""Implements engine.kernels.base.Kernels with the functions of kernels.cpp, in bfloat16.

Every operation is one call that runs without the interpreter lock. Where the processor has a matrix
unit, steps of many rows run on torch's operators, which use it; weights are then kept packed for
both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from engine.kernels.activation import Activation
from engine.kernels.base import Geometry, KVPlace, LayerParts, Linear, Product, StepInputs
from engine.kernels.cpu.huge_pages import advise_huge_pages
from engine.kernels.cpu.operations import CpuKernels, CpuPlan, DenseGated, DenseLinear
from engine.kernels.native import products
from engine.kernels.native.build import (
    AttentionShape,
    LayerStructure,
    PlanStructure,
    ProductParts,
    has_matrix_unit,
    load_library,
)
from engine.kernels.native.products import PackedProduct, Threads
from engine.quantization.weight import Weight, dense

_HEAD_DIMS = (64, 96, 128, 256)
#: Rows from which a matrix unit is used: fewer take as long as reading the weights.
_WIDE_ROWS = 33


def serves(geometry: Geometry) -> bool:
    """Whether this machine and this shape have these kernels."""
    if geometry.dtype is not torch.bfloat16 or geometry.head_dim not in _HEAD_DIMS:
        return False
    return load_library() is not None


class NativeLinear:
    """The product x W^T + b, or its sum with a residual; `wide` computes it for many rows."""

    def __init__(self, product: PackedProduct, bias: Tensor | None, wide: Linear | None) -> None:
        self._product = product
        self._bias = bias
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide is not None and x.shape[0] >= _WIDE_ROWS:
            return self._wide(x)
        return self._product.run(x, self._bias, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._wide is not None and x.shape[0] >= _WIDE_ROWS:
            return self._wide.add(x, residual)
        return self._product.run(x, self._bias, residual.contiguous())

    @property
    def parts(self) -> ProductParts | None:
        """The product for `baton_layers`."""
        return self._product.parts(self._bias, None)


class NativeGated:
    """The product silu(x gate^T + b) * (x up^T + b) as one call; `wide` as in NativeLinear."""

    def __init__(
        self,
        product: PackedProduct,
        biases: tuple[Tensor | None, Tensor | None],
        wide: Product | None,
    ) -> None:
        self._product = product
        self._biases = biases
        self._wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide is not None and x.shape[0] >= _WIDE_ROWS:
            return self._wide(x)
        return self._product.run(x, *self._biases)

    @property
    def parts(self) -> ProductParts | None:
        """The product for `baton_layers`."""
        return self._product.parts(*self._biases)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """What the layers of one step share. queries, contexts, starts, tables: int32, as `attend`
    takes them; shape: with their window."""

    shape: AttentionShape

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    queries: Tensor
    contexts: Tensor
    starts: Tensor
    tables: Tensor

    def structure(self) -> PlanStructure:
        """The plan for `baton_layers`; it refers to the tensors of this one."""
        shared = (self.cos, self.sin, self.positions, self.slots)
        lists = (self.queries, self.contexts, self.starts, self.tables)
        return PlanStructure(
            *(ctypes.addressof(self.shape), *(tensor.data_ptr() for tensor in shared)),
            *(self.queries.shape[0], *(tensor.data_ptr() for tensor in lists)),
        )


class NativeStack:
    """Layers as one call, which needs the interpreter once. `layers` keep what `structures` refer
    to."""

    def __init__(
        self,
        function: Any,
        threads: Threads,
        layers: Sequence[LayerParts],
        structures: Sequence[LayerStructure],
    ) -> None:
        self._function = function
        self._threads = threads
        self._layers = layers
        self._structures = (LayerStructure * len(structures))(*structures)

    def __call__(self, h: Tensor, kv: Sequence[Tensor], plans: Sequence[Any]) -> Tensor | None:
        if any(isinstance(plan, CpuPlan) for plan in plans):
            return None
        count, h = len(self._structures), h.clone(memory_format=torch.contiguous_format)
        shared = {id(plan): plan.structure() for plan in plans}
        at = (ctypes.c_void_p * count)(*(ctypes.addressof(shared[id(plan)]) for plan in plans))
        pools = (ctypes.c_void_p * count)(*(layer.data_ptr() for layer in kv))
        self._function(
            *(ctypes.addressof(self._structures), count, ctypes.addressof(at)),
            *(ctypes.addressof(pools), kv[0].itemsize, h.data_ptr(), h.shape[0]),
            self._threads.count,
        )
        return h


class NativeKernels:
    """The operations of one rank on the CPU that the library was built for."""

    def __init__(self, geometry: Geometry, matrix_unit: bool | None = None) -> None:
        """`matrix_unit`: whether torch runs steps of many rows; None asks the processor."""
        library = load_library()
        assert library is not None, "ask `serves` first"
        has_unit = has_matrix_unit() if matrix_unit is None else matrix_unit
        self._wide = CpuKernels(geometry) if has_unit else None
        self.geometry = geometry
        self._library = library
        self._threads = Threads()
        self._weights: list[Tensor] = []
        self._shapes: dict[int | None, AttentionShape] = {}

    def use_threads(self, count: int) -> None:
        self._threads.count = count
        _set_torch_threads(1)

    def loaded(self) -> None:
        if self._wide is not None:
            self._wide.loaded()
        advise_huge_pages(self._weights)
        self._weights.clear()

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if not products.serves(weight):
            weight = dense(weight)
            if not products.serves(weight):
                return DenseLinear(weight, bias)
        wide = None if self._wide is None else self._wide.linear(weight, bias)
        product = products.product(self._library, self._threads, weight)
        self._weights.append(product.weight)
        return NativeLinear(product, bias, wide)

    def gated_linear(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> Product:
        if activation is not Activation.SILU:
            return DenseGated(self.linear(gate, gate_bias), self.linear(up, up_bias), activation)
        if not (products.serves(gate) and products.serves(up)):
            gate, up = dense(gate), dense(up)
            if not products.serves(gate):
                return DenseGated(DenseLinear(gate, gate_bias), DenseLinear(up, up_bias))
        wide = None
        if self._wide is not None:
            wide = self._wide.gated_linear(gate, up, gate_bias, up_bias)
        product = products.gated_product(self._library, self._threads, gate, up)
        self._weights.append(product.weight)
        return NativeGated(product, (gate_bias, up_bias), wide)

    def prepare(
        self,
        inputs: StepInputs,
        cos: Tensor,
        sin: Tensor,
        window: int | None = None,
        place: KVPlace | None = None,
    ) -> NativePlan | CpuPlan:
        """Concatenated block tables; for many rows and a matrix unit, the plan of torch's
        operators. Torch's own threads spin for a while after each operator, so they are off while
        these kernels run."""
        assert place is None, "KV heads of several sizes are for torch's operators"
        if self._wide is not None:
            if inputs.num_tokens >= _WIDE_ROWS:
                _set_torch_threads(self._threads.count)
                return self._wide.prepare(inputs, cos, sin, window)
            _set_torch_threads(1)
        lengths = [len(ids) for ids in inputs.block_ids]
        return NativePlan(
            shape=self._shape(window),
            cos=cos,
            sin=sin,
            positions=inputs.positions,
            slots=inputs.slots,
            queries=_int32(inputs.queries),
            contexts=_int32(inputs.contexts),
            starts=_int32(list(accumulate(lengths[:-1], initial=0))),
            tables=_int32(list(chain.from_iterable(inputs.block_ids))),
        )

    def _shape(self, window: int | None) -> AttentionShape:
        shape = self._shapes.get(window)
        if shape is None:
            geometry = self.geometry
            heads = geometry.num_q_heads + 2 * geometry.num_kv_heads
            shape = self._shapes[window] = AttentionShape(
                geometry.num_q_heads,
                geometry.num_kv_heads,
                geometry.head_dim,
                geometry.block_size,
                heads * geometry.head_dim,
                window or 0,
                geometry.scale,
                geometry.softcap or 0.0,
            )
        return shape

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._wide is not None and x.shape[0] >= _WIDE_ROWS:
            return self._wide.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        wide = weight.dtype is torch.float32
        norm = self._library.baton_rms_norm_f32 if wide else self._library.baton_rms_norm
        norm(
            x.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            self._threads.count,
        )
        return out

    def rope_and_write_kv(self, qkv: Tensor, kv: Tensor, plan: NativePlan | CpuPlan) -> Tensor:
        """Write k and v; the rotated q is a view of `qkv`."""
        if isinstance(plan, CpuPlan):
            assert self._wide is not None
            return self._wide.rope_and_write_kv(qkv, kv, plan)
        self._library.baton_rope(
            *(qkv.data_ptr(), qkv.shape[0], ctypes.addressof(plan.shape)),
            *(plan.cos.data_ptr(), plan.sin.data_ptr(), plan.positions.data_ptr()),
            *(plan.slots.data_ptr(), kv.data_ptr(), kv.itemsize, self._threads.count),
        )
        heads = qkv.view(qkv.shape[0], -1, self.geometry.head_dim)
        return heads[:, : self.geometry.num_q_heads]

    def paged_attention(self, q: Tensor, kv: Tensor, plan: NativePlan | CpuPlan) -> Tensor:
        if isinstance(plan, CpuPlan):
            assert self._wide is not None
            return self._wide.paged_attention(q, kv, plan)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        self._library.baton_attend(
            *(ctypes.addressof(plan.shape), q.data_ptr(), kv.data_ptr(), kv.itemsize),
            plan.queries.shape[0],
            *(plan.queries.data_ptr(), plan.contexts.data_ptr(), plan.starts.data_ptr()),
            *(plan.tables.data_ptr(), out.data_ptr(), self._threads.count),
        )
        return out

    def stack(self, layers: Sequence[LayerParts]) -> NativeStack | None:
        structures = [structure for each in layers if (structure := _structure(each)) is not None]
        if not layers or len(structures) < len(layers):
            return None
        return NativeStack(self._library.baton_layers, self._threads, layers, structures)


def _structure(layer: LayerParts) -> LayerStructure | None:
    """A layer for `baton_layers`; None if a product of it is not of this library."""
    products: list[ProductParts] = []
    for each in (layer.qkv, layer.out, layer.gate_up, layer.down):
        parts = each.parts if isinstance(each, NativeLinear | NativeGated) else None
        if parts is None:
            return None
        products.append(parts)
    norms = layer.attention_norm, layer.mlp_norm
    wide = norms[0].dtype is torch.float32
    return LayerStructure(*products, *(norm.data_ptr() for norm in norms), wide, layer.eps)


def _set_torch_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
