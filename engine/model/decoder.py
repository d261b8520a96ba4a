"""Decoder of every family over paged KV, one rank's share of it.

Shapes as in engine.kernels.base; h is the residual stream. Where a family leaves out a norm, its
weight is empty (engine.model.weights). The vocabulary is split by rows: every rank holds
`vocab_rows` of them. Rows past the end of the vocabulary are padding, cut off before sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.base import Kernels, KVPlace, LayerParts, StepInputs
from engine.model.config import ModelConfig, QkNorm
from engine.model.kv_groups import LayerGroups, group_layers
from engine.model.sharding import RankShare
from engine.model.weights import LayerWeights, WeightLoader
from engine.quantization.weight import Weight, halves
from engine.ranks.tensor_parallel import TensorParallel


class RowParallelLinear:
    """x W^T + b with W split by input columns: every rank holds a partial sum, all-reduced here.

    The bias is given on rank 0 only, so that it counts once.
    """

    def __init__(
        self, kernels: Kernels, weight: Weight, bias: Tensor | None, tp: TensorParallel
    ) -> None:
        self.linear = kernels.linear(weight, bias)
        self._tp = tp

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum residual + x W^T + b; rank 0 brings the residual into the all-reduce."""
        if residual is None:
            return self._tp.all_reduce(self.linear(x))
        first = self._tp.rank == 0
        return self._tp.all_reduce(self.linear.add(x, residual) if first else self.linear(x))


class VocabularyEmbedding:
    """Token ids to vectors, each from the rank that holds its row."""

    def __init__(self, table: Tensor, share: RankShare, tp: TensorParallel) -> None:
        self._table = table
        self._share = share
        self._tp = tp

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T] -> [T, H]`, equal on every rank."""
        if self._tp.size == 1:
            return functional.embedding(token_ids, self._table)
        first, last = self._share.vocab
        elsewhere = (token_ids < first) | (token_ids >= last)
        local = (token_ids - first).masked_fill_(elsewhere, 0)
        out = functional.embedding(local, self._table).masked_fill_(elsewhere[:, None], 0)
        return self._tp.all_reduce(out)


class VocabularyHead:
    """Vectors to logits, gathered on rank 0."""

    def __init__(
        self, kernels: Kernels, weight: Weight, vocab_size: int, tp: TensorParallel
    ) -> None:
        self._linear = kernels.linear(weight, None)
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor | None:
        """`[n, H] -> [n, vocabulary]` on rank 0, None on the others."""
        parts = self._tp.gather(self._linear(x))
        if parts is None:
            return None
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return logits[:, : self._vocab_size]


class ForwardOutput(NamedTuple):
    """logits: of `StepInputs.sample_rows`, on rank 0 only. hidden: states of `score_rows`, for
    `Decoder.logits`. residual: `[T, H]`, input of the last layer. None without such rows."""

    logits: Tensor | None
    hidden: Tensor | None
    residual: Tensor


class DecoderLayer:
    """Attention and MLP of one decoder layer."""

    def __init__(
        self,
        weights: LayerWeights[Weight],
        config: ModelConfig,
        kernels: Kernels,
        tp: TensorParallel,
    ) -> None:
        self._weights = weights
        self._config = config
        self._kernels = kernels
        self._tp = tp
        self._qkv = kernels.linear(weights.qkv, weights.qkv_bias)
        self._out = RowParallelLinear(kernels, weights.out, weights.out_bias, tp)
        gate, up = halves(weights.gate_up)
        bias = weights.gate_up_bias
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        self._gate_up = kernels.gated_linear(gate, up, gate_bias, up_bias, config.activation)
        self._down = RowParallelLinear(kernels, weights.down, weights.down_bias, tp)

    def parts(self) -> LayerParts | None:
        """The layer for `Kernels.stack`; None if it is of another shape or split over ranks."""
        weights = self._weights
        others = (weights.attention_post_norm, weights.mlp_post_norm, weights.output_scale)
        norms = weights.attention_norm, weights.mlp_norm
        plain = self._config.qk_norm is QkNorm.NONE and not any(map(Tensor.numel, others))
        if not plain or self._tp.size > 1 or not all(map(Tensor.numel, norms)):
            return None
        return LayerParts(
            attention_norm=norms[0],
            qkv=self._qkv,
            out=self._out.linear,
            mlp_norm=norms[1],
            gate_up=self._gate_up,
            down=self._down.linear,
            eps=self._config.rms_norm_eps,
        )

    def query(self, h: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Rotated queries; this layer's k and v are written into `kv`."""
        qkv = self._qkv(self._normed(h, self._weights.attention_norm))
        if self._config.qk_norm is not QkNorm.NONE:
            self._norm_heads(qkv)
        return self._kernels.rope_and_write_kv(qkv, kv, plan)

    def finish(self, attended: Tensor, h: Tensor) -> Tensor:
        """Output projection and MLP."""
        h = self._add(self._out, attended, h, self._weights.attention_post_norm)
        x = self._gate_up(self._normed(h, self._weights.mlp_norm))
        h = self._add(self._down, x, h, self._weights.mlp_post_norm)
        scale = self._weights.output_scale
        return h * scale if scale.numel() else h

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if not weight.numel():
            return x
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)

    def _add(self, product: RowParallelLinear, x: Tensor, h: Tensor, norm: Tensor) -> Tensor:
        return h + self._normed(product(x), norm) if norm.numel() else product(x, h)

    def _norm_heads(self, qkv: Tensor) -> None:
        """Norm q and k, and v where the family does, of `[T, (Q + 2 K) D]` in place."""
        dim = self._config.head_dim
        for weight, first, last in self._weights.head_norms():
            part = qkv[:, first * dim : last * dim]
            if self._config.qk_norm is QkNorm.HEAD:
                heads = part.unflatten(1, (-1, dim))
                part.copy_(self._normed(heads, weight).flatten(1))
            else:
                part.copy_(self._normed_over_ranks(part, weight, last - first))

    def _normed_over_ranks(self, x: Tensor, weight: Tensor, heads: int) -> Tensor:
        """RMS norm over the heads of all ranks, which hold `heads` each of so many in all."""
        squares = self._tp.all_reduce(x.float().pow(2).sum(-1, keepdim=True))
        width = self._tp.all_reduce(torch.full_like(squares[:1], float(heads))) * (
            self._config.head_dim
        )
        inverse = torch.rsqrt(squares / width + self._config.rms_norm_eps)
        return (x.float() * inverse * weight.float()).to(x.dtype)


class Decoder:
    """The whole decoder of one rank."""

    def __init__(
        self,
        loader: WeightLoader,
        kernels: Kernels,
        tp: TensorParallel,
        max_positions: int,
    ) -> None:
        config = loader.config
        self._config = config
        self._kernels = kernels
        self._tables = loader.rotations(max_positions)
        groups = group_layers(config, max_positions)
        #: Of each layer: its rotation, window, KV group and place in a slot. Layers that are alike
        #: share a plan.
        self._kinds = [
            (*kind, group, _place(config, groups, layer, tp.size))
            for layer, (kind, (group, _)) in enumerate(
                zip(loader.layer_kinds(max_positions), groups.places, strict=True)
            )
        ]
        self._slots = [slot for _, slot in groups.places]
        table = loader.embedding()
        self._embedding = VocabularyEmbedding(table, loader.share, tp)
        self._layers = [
            DecoderLayer(loader.layer(index), config.of_layer(index), kernels, tp)
            for index in range(config.num_layers)
        ]
        self._norm = loader.norm()
        self._head = VocabularyHead(kernels, loader.head(table), config.vocab_size, tp)
        kernels.loaded()
        # The last layer runs for fewer rows.
        parts = [part for layer in self._layers[:-1] if (part := layer.parts()) is not None]
        whole = len(parts) == len(self._layers) - 1
        self._stack = kernels.stack(parts) if whole else None

    def forward(self, groups: Sequence[StepInputs], pool: Sequence[Tensor]) -> ForwardOutput:
        """Run a step, given for each KV group. All its KV is in `pool`, by slots, afterwards."""
        prepared = {
            kind: self._kernels.prepare(groups[kind[2]], *self._tables[kind[0]], kind[1], kind[3])
            for kind in dict.fromkeys(self._kinds)
        }
        inputs, kv = groups[0], [pool[slot] for slot in self._slots]
        plans = [prepared[kind] for kind in self._kinds]
        h = self._embedding(inputs.token_ids)
        if self._config.embedding_scale != 1.0:
            # The scale has the precision of the model, as transformers rounds it.
            h = h * torch.tensor(self._config.embedding_scale, dtype=h.dtype)
        h = self._through(h, kv[:-1], plans[:-1])
        return self._last(h, inputs, kv[-1], plans[-1])

    def _through(self, h: Tensor, kv: Sequence[Tensor], plans: Sequence[Any]) -> Tensor:
        """All layers but the last."""
        stacked = None if self._stack is None else self._stack(h, kv, plans)
        if stacked is not None:
            return stacked
        for layer, layer_kv, plan in zip(self._layers[:-1], kv, plans, strict=True):
            q = layer.query(h, layer_kv, plan)
            h = layer.finish(self._kernels.paged_attention(q, layer_kv, plan), h)
        return h

    def logits(self, x: Tensor) -> Tensor | None:
        """Logits of hidden states `[n, H]`, on rank 0; all ranks must ask for the same rows."""
        logits = self._head(x)
        cap = self._config.final_softcap
        return logits if logits is None or cap is None else torch.tanh(logits / cap) * cap

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
        h = layer.finish(attended, h)
        x = self._kernels.rms_norm(h, self._norm, self._config.rms_norm_eps)
        logits = self.logits(x[:num_sampled]) if num_sampled else None
        return ForwardOutput(logits, x[num_sampled:] if num_scored else None, residual)


def _place(config: ModelConfig, groups: LayerGroups, layer: int, size: int) -> KVPlace | None:
    """Where a layer's KV heads lie on one of `size` ranks; None where all layers have the same."""
    if len(set(config.kv_shapes)) == 1:
        return None
    num_kv_heads, head_dim = config.kv_shapes[layer]
    return KVPlace(
        num_kv_heads=num_kv_heads // size,
        head_dim=head_dim,
        num_planes=groups.planes.count // size,
        plane_dim=groups.planes.plane_dim,
        part=groups.parts[layer],
    )
