"""Llama-family decoder over paged KV, one rank's share of it.

Shapes as in engine.kernels.base; h is the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.base import Kernels, StepInputs
from engine.model.parallel import RowParallelLinear, VocabularyEmbedding, VocabularyHead
from engine.model.weights import LayerWeights, WeightLoader
from engine.ranks.tensor_parallel import TensorParallel


class ForwardOutput(NamedTuple):
    """logits: of `StepInputs.sample_rows`, on rank 0 only. hidden: states of `score_rows`, for
    `LlamaModel.logits`. residual: `[T, H]`, input of the last layer. None without such rows."""

    logits: Tensor | None
    hidden: Tensor | None
    residual: Tensor


class LlamaLayer:
    """Attention and MLP of one decoder layer."""

    def __init__(
        self, weights: LayerWeights, eps: float, kernels: Kernels, tp: TensorParallel
    ) -> None:
        self._kernels = kernels
        self._eps = eps
        self._attention_norm, self._mlp_norm = weights.attention_norm, weights.mlp_norm
        self._qkv = kernels.linear(weights.qkv, weights.qkv_bias)
        self._out = RowParallelLinear(kernels, weights.out, weights.out_bias, tp)
        gate, up = weights.gate_up.chunk(2)
        biases = (None, None) if weights.gate_up_bias is None else weights.gate_up_bias.chunk(2)
        self._gate_up = kernels.gated_linear(gate, up, *biases)
        self._down = RowParallelLinear(kernels, weights.down, weights.down_bias, tp)

    def query(self, h: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Rotated queries; this layer's k and v are written into `kv`."""
        x = self._kernels.rms_norm(h, self._attention_norm, self._eps)
        return self._kernels.rope_and_write_kv(self._qkv(x), kv, plan)

    def finish(self, attended: Tensor, h: Tensor) -> Tensor:
        """Output projection and MLP."""
        h = self._out(attended, h)
        x = self._kernels.rms_norm(h, self._mlp_norm, self._eps)
        return self._down(self._gate_up(x), h)


class LlamaModel:
    """The whole decoder of one rank."""

    def __init__(
        self,
        loader: WeightLoader,
        kernels: Kernels,
        tp: TensorParallel,
        max_positions: int,
    ) -> None:
        config = loader.config
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._cos, self._sin = loader.rotations(max_positions)
        table = loader.embedding()
        self._embedding = VocabularyEmbedding(table, loader.share, tp)
        self._layers = [
            LlamaLayer(loader.layer(index), self._eps, kernels, tp)
            for index in range(config.num_layers)
        ]
        self._norm = loader.norm()
        self._head = VocabularyHead(kernels, loader.head(table), config.vocab_size, tp)
        kernels.loaded()

    def forward(self, inputs: StepInputs, kv: Sequence[Tensor]) -> ForwardOutput:
        """Run a step. All its KV is in `kv` afterwards."""
        plan = self._kernels.prepare(inputs, self._cos, self._sin)
        h = self._embedding(inputs.token_ids)
        for layer, layer_kv in zip(self._layers[:-1], kv[:-1], strict=True):
            q = layer.query(h, layer_kv, plan)
            h = layer.finish(self._kernels.paged_attention(q, layer_kv, plan), h)
        return self._last(h, inputs, kv[-1], plan)

    def logits(self, x: Tensor) -> Tensor | None:
        """Logits of hidden states `[n, H]`, on rank 0; all ranks must ask for the same rows."""
        return self._head(x)

    def _last(self, h: Tensor, inputs: StepInputs, kv: Tensor, plan: Any) -> ForwardOutput:
        """The last layer: KV of all rows, the rest only of rows that are sampled or scored."""
        layer, residual = self._layers[-1], h
        q = layer.query(h, kv, plan)
        num_sampled, num_scored = inputs.sample_rows.shape[0], inputs.score_rows.shape[0]
        if num_sampled + num_scored == 0:
            return ForwardOutput(None, None, residual)
        attended = self._kernels.paged_attention(q, kv, plan)
        if not inputs.samples_all:
            rows = torch.cat((inputs.sample_rows, inputs.score_rows))
            attended, h = attended[rows], h[rows]
        x = self._kernels.rms_norm(layer.finish(attended, h), self._norm, self._eps)
        logits = self._head(x[:num_sampled]) if num_sampled else None
        return ForwardOutput(logits, x[num_sampled:] if num_scored else None, residual)
