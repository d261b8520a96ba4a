"""Llama-family decoder over paged KV, one rank's share of it.

Shapes as in engine.kernels.base. The residual stream travels as (h, delta): delta is what the last
block adds and the next norm sums, or None where the device has fused that sum into the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.base import Kernels, Linear, Product, StepInputs
from engine.layers.linear import RowParallelLinear
from engine.layers.rotary import rotary_tables
from engine.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from engine.model.config import ModelConfig
from engine.model.sharding import RankShare, Span
from engine.tp import TensorParallel


class WeightSource(Protocol):
    """Where weights come from: slices of named tensors, in the dtype and on the device wanted."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """The slice of tensor `name`, whose whole shape must be `shape`."""
        ...


class LlamaLayer:
    """Attention and MLP of one decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        share: RankShare,
        index: int,
        source: WeightSource,
        kernels: Kernels,
        tp: TensorParallel,
    ) -> None:
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._config = config
        self._source = source
        self._prefix = f"model.layers.{index}."
        self._attention_norm = self._norm("input_layernorm")
        self._mlp_norm = self._norm("post_attention_layernorm")
        self._qkv = self._load_qkv(share)
        self._out = self._load_row(
            "self_attn.o_proj",
            config.num_heads * config.head_dim,
            _times(share.q_heads, config.head_dim),
            config.attention_bias,
            tp,
        )
        self._gate_up = self._load_gate_up(share)
        self._down = self._load_row(
            "mlp.down_proj", config.intermediate_size, share.intermediate, config.mlp_bias, tp
        )
        del self._source

    def _norm(self, name: str) -> Tensor:
        return self._source.read(f"{self._prefix}{name}.weight", (self._config.hidden_size,))

    def _column(
        self, name: str, total: int, rows: Span, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        shape = (total, self._config.hidden_size)
        weight = self._source.read(f"{self._prefix}{name}.weight", shape, rows=rows)
        if not bias:
            return weight, None
        return weight, self._source.read(f"{self._prefix}{name}.bias", (total,), rows=rows)

    def _load_qkv(self, share: RankShare) -> Linear:
        config, dim = self._config, self._config.head_dim
        parts = [
            self._column(
                f"self_attn.{name}_proj", heads * dim, _times(span, dim), config.attention_bias
            )
            for name, heads, span in (
                ("q", config.num_heads, share.q_heads),
                ("k", config.num_kv_heads, share.kv_heads),
                ("v", config.num_kv_heads, share.kv_heads),
            )
        ]
        biases = [bias for _, bias in parts if bias is not None]
        weight = torch.cat([weight for weight, _ in parts])
        return self._kernels.linear(weight, torch.cat(biases) if biases else None)

    def _load_gate_up(self, share: RankShare) -> Product:
        config = self._config
        (gate, gate_bias), (up, up_bias) = (
            self._column(name, config.intermediate_size, share.intermediate, config.mlp_bias)
            for name in ("mlp.gate_proj", "mlp.up_proj")
        )
        return self._kernels.gated_linear(gate, up, gate_bias, up_bias)

    def _load_row(
        self, name: str, total: int, columns: Span, bias: bool, tp: TensorParallel
    ) -> RowParallelLinear:
        hidden = self._config.hidden_size
        weight = self._source.read(f"{self._prefix}{name}.weight", (hidden, total), columns=columns)
        added = self._source.read(f"{self._prefix}{name}.bias", (hidden,)) if bias else None
        return RowParallelLinear(self._kernels, weight, added, tp)

    def attention_inputs(
        self, h: Tensor, delta: Tensor | None, kv: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor]:
        """(q, h): this layer's k and v are written into `kv`."""
        x, h = self._kernels.add_rms_norm(h, delta, self._attention_norm, self._eps)
        return self._kernels.rope_and_write_kv(self._qkv(x), kv, plan), h

    def finish(self, attended: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """Everything after attention: output projection, then the MLP."""
        h, delta = self._out(attended, h)
        x, h = self._kernels.add_rms_norm(h, delta, self._mlp_norm, self._eps)
        return self._down(self._gate_up(x), h)


class LlamaModel:
    """The whole decoder of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        share: RankShare,
        source: WeightSource,
        kernels: Kernels,
        tp: TensorParallel,
        max_positions: int,
    ) -> None:
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        cos, sin = rotary_tables(config.rope, config.head_dim, max_positions)
        self._cos = cos.to(kernels.geometry.device)
        self._sin = sin.to(kernels.geometry.device)
        shape = (config.vocab_size, config.hidden_size)
        table = _padded(source.read("model.embed_tokens.weight", shape, rows=share.vocab), share)
        self._embedding = VocabularyEmbedding(kernels, table, share, tp)
        self._layers = [
            LlamaLayer(config, share, index, source, kernels, tp)
            for index in range(config.num_layers)
        ]
        self._norm = source.read("model.norm.weight", (config.hidden_size,))
        if not config.tie_word_embeddings:
            table = _padded(source.read("lm_head.weight", shape, rows=share.vocab), share)
        self._head = VocabularyHead(kernels, table, config.vocab_size, tp)
        kernels.loaded()

    def forward(
        self, inputs: StepInputs, kv: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the step: (logits, hidden states).

        Logits are those of `inputs.sample_rows` on rank 0, None on others or without rows; hidden
        states are those of `inputs.score_rows`, for `logits`, or None without rows. All KV of the
        step is in `kv` afterwards.
        """
        plan = self._kernels.prepare(inputs, self._cos, self._sin)
        h, delta = self._embedding(inputs.token_ids.to(self._cos.device)), None
        for layer, layer_kv in zip(self._layers[:-1], kv[:-1], strict=True):
            q, h = layer.attention_inputs(h, delta, layer_kv, plan)
            h, delta = layer.finish(self._kernels.paged_attention(q, layer_kv, plan), h)
        return self._last(h, delta, inputs, kv[-1], plan)

    def logits(self, x: Tensor) -> Tensor | None:
        """Logits of hidden states `[n, H]`, on rank 0; all ranks must ask for the same rows."""
        return self._head(x)

    def _last(
        self, h: Tensor, delta: Tensor | None, inputs: StepInputs, kv: Tensor, plan: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """The last layer, beyond its KV only for the rows that are looked at."""
        layer = self._layers[-1]
        q, h = layer.attention_inputs(h, delta, kv, plan)
        num_sampled, num_scored = inputs.sample_rows.shape[0], inputs.score_rows.shape[0]
        if num_sampled + num_scored == 0:
            return None, None
        attended = self._kernels.paged_attention(q, kv, plan)
        if not inputs.samples_all:
            rows = torch.cat((inputs.sample_rows, inputs.score_rows)).to(h.device)
            attended, h = attended[rows], h[rows]
        h, delta = layer.finish(attended, h)
        x, _ = self._kernels.add_rms_norm(h, delta, self._norm, self._eps)
        logits = self._head(x[:num_sampled]) if num_sampled else None
        return logits, x[num_sampled:] if num_scored else None


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor


def _padded(table: Tensor, share: RankShare) -> Tensor:
    missing = share.vocab_rows - table.shape[0]
    if missing == 0:
        return table
    return torch.cat((table, table.new_zeros(missing, table.shape[1])))
