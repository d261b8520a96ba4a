"""Layers in one call against the same operations called one by one: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import Quantization
from engine.kernels.base import LayerParts
from engine.kernels.native import build
from engine.quantization.at_load import quantise
from engine.quantization.weight import Weight
from tests.support.engine import NUM_BLOCKS, step_of
from tests.unit.engine.kernels.native.test_kernels import BF16, native

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler, or a processor without AVX-512 BF16"
)
_HIDDEN, _INNER, _EPS = 128, 192, 1e-5
_Q, _KV, _DIM, _BLOCK = 6, 2, 64, 16


def _parts(kernels: Any, weight: Callable[[int, int], Weight], *, biased: bool) -> LayerParts:
    def bias(size: int) -> Tensor | None:
        return torch.randn(size).to(BF16) if biased else None

    heads = _Q * _DIM
    gate, up = weight(_INNER, _HIDDEN), weight(_INNER, _HIDDEN)
    return LayerParts(
        attention_norm=torch.rand(_HIDDEN).to(BF16),
        qkv=kernels.linear(weight(heads + 2 * _KV * _DIM, _HIDDEN), bias(heads + 2 * _KV * _DIM)),
        out=kernels.linear(weight(_HIDDEN, heads), bias(_HIDDEN)),
        mlp_norm=torch.rand(_HIDDEN).to(BF16),
        gate_up=kernels.gated_linear(gate, up, bias(_INNER), bias(_INNER)),
        down=kernels.linear(weight(_HIDDEN, _INNER), bias(_HIDDEN)),
        eps=_EPS,
    )


def _one_by_one(kernels: Any, layer: LayerParts, h: Tensor, kv: Tensor, plan: Any) -> Tensor:
    qkv = layer.qkv(kernels.rms_norm(h, layer.attention_norm, _EPS))
    q = kernels.rope_and_write_kv(qkv, kv, plan)
    h = layer.out.add(kernels.paged_attention(q, kv, plan), h)
    return layer.down.add(layer.gate_up(kernels.rms_norm(h, layer.mlp_norm, _EPS)), h)


@pytest.mark.parametrize("kind", [None, Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("lengths", [[(40, 1)], [(40, 1), (2, 1), (0, 6), (30, 70)]])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_layers_in_one_call_give_what_single_calls_give(kind, lengths, kv_dtype):
    torch.manual_seed(0)

    def weight(outputs: int, inputs: int) -> Weight:
        matrix = (torch.randn(outputs, inputs) / inputs**0.5).to(BF16)
        return matrix if kind is None else quantise(matrix, kind)

    kernels = native(_Q, _KV, _DIM, _BLOCK)
    layers = [_parts(kernels, weight, biased=biased) for biased in (True, False)]
    stack = kernels.stack(layers)
    inputs = step_of(lengths, _BLOCK)
    cos, sin = torch.rand(200, _DIM // 2), torch.rand(200, _DIM // 2)
    plans = [kernels.prepare(inputs, cos, sin, window) for window in (None, 24)]
    pools = torch.randn(2, NUM_BLOCKS, 2, _KV, _BLOCK, _DIM).to(kv_dtype)
    others = pools.clone()
    given = torch.randn(inputs.num_tokens, _HIDDEN).to(BF16)
    h = given.clone()
    for layer, kv, plan in zip(layers, pools, plans, strict=True):
        h = _one_by_one(kernels, layer, h, kv, plan)
    before = given.clone()
    assert stack(given, list(others), plans).equal(h)
    assert given.equal(before)
    assert others.view(torch.uint8).equal(pools.view(torch.uint8))


def test_layers_with_other_products_run_one_by_one():
    kernels = native(_Q, _KV, _DIM, _BLOCK)
    odd = _parts(
        kernels, lambda outputs, inputs: torch.randn(outputs, inputs).to(BF16), biased=True
    )
    assert kernels.stack([odd]) is not None
    assert kernels.stack([]) is None
    left_to_torch = kernels.linear(torch.randn(_HIDDEN, 63).to(BF16), None)
    changed = {name: getattr(odd, name) for name in LayerParts.__slots__}
    assert kernels.stack([odd, LayerParts(**(changed | {"down": left_to_torch}))]) is None
