"""One rank's weights, with the projections that share an input fused into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.checkpoint import EMBEDDING, HEAD
from engine.model.config import ModelConfig
from engine.model.rotary import rotary_tables
from engine.model.sharding import RankShare, Span


class WeightSource(Protocol):
    """Slices of named tensors, in the dtype and on the device of the engine."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are `[out, in]`; gate rows precede up rows.

    Biases of the row-parallel products (out, down) are on rank 0 only, so that they count once.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All of a rank's weights; cos and sin are float32 `[positions, head_dim / 2]`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor


class WeightLoader:
    """Reads one rank's share of a Llama-family checkpoint."""

    def __init__(
        self, config: ModelConfig, share: RankShare, source: WeightSource, device: torch.device
    ) -> None:
        self.config = config
        self.share = share
        self._source = source
        self._device = device

    def load(self, max_positions: int) -> ModelWeights:
        cos, sin = self.rotations(max_positions)
        embedding = self.embedding()
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self.layer(index) for index in range(self.config.num_layers)),
            norm=self.norm(),
            head=self.head(embedding),
            cos=cos,
            sin=sin,
        )

    def rotations(self, max_positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_tables(self.config.rope, self.config.head_dim, max_positions)
        return cos.to(self._device), sin.to(self._device)

    def embedding(self) -> Tensor:
        """This rank's rows of the vocabulary, zeros behind them up to `vocab_rows`."""
        return self._vocabulary(EMBEDDING)

    def head(self, embedding: Tensor) -> Tensor:
        """Rows of the output head, which is the embedding in a tied model."""
        tied = self.config.tie_word_embeddings
        return embedding if tied else self._vocabulary(HEAD)

    def norm(self) -> Tensor:
        return self._norm("model.norm")

    def _vocabulary(self, name: str) -> Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        table = self._source.read(name, shape, rows=self.share.vocab)
        missing = self.share.vocab_rows - table.shape[0]
        if missing == 0:
            return table
        return torch.cat((table, table.new_zeros(missing, table.shape[1])))

    def layer(self, index: int) -> LayerWeights:
        config, share = self.config, self.share
        prefix, dim = f"model.layers.{index}.", config.head_dim
        q = (config.num_heads * dim, _times(share.q_heads, dim))
        kv = (config.num_kv_heads * dim, _times(share.kv_heads, dim))
        mlp = (config.intermediate_size, share.intermediate)
        attention = [
            (f"{prefix}self_attn.{name}_proj", *rows)
            for name, rows in (("q", q), ("k", kv), ("v", kv))
        ]
        gated = [(f"{prefix}mlp.{name}_proj", *mlp) for name in ("gate", "up")]
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=torch.cat([self._rows(*part) for part in attention]),
            qkv_bias=self._biases(attention, config.attention_bias),
            out=self._columns(f"{prefix}self_attn.o_proj", *q),
            out_bias=self._row_bias(f"{prefix}self_attn.o_proj", config.attention_bias),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up=torch.cat([self._rows(*part) for part in gated]),
            gate_up_bias=self._biases(gated, config.mlp_bias),
            down=self._columns(f"{prefix}mlp.down_proj", *mlp),
            down_bias=self._row_bias(f"{prefix}mlp.down_proj", config.mlp_bias),
        )

    def _norm(self, name: str) -> Tensor:
        return self._source.read(f"{name}.weight", (self.config.hidden_size,))

    def _rows(self, name: str, total: int, rows: Span) -> Tensor:
        return self._source.read(f"{name}.weight", (total, self.config.hidden_size), rows=rows)

    def _columns(self, name: str, total: int, columns: Span) -> Tensor:
        shape = (self.config.hidden_size, total)
        return self._source.read(f"{name}.weight", shape, columns=columns)

    def _biases(self, parts: list[tuple[str, int, Span]], wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.cat(
            [self._source.read(f"{name}.bias", (total,), rows=rows) for name, total, rows in parts]
        )

    def _row_bias(self, name: str, wanted: bool) -> Tensor | None:
        if not wanted or self.share.rank:
            return None
        return self._source.read(f"{name}.bias", (self.config.hidden_size,))


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor
