"""One rank's weights, with the projections that share an input fused into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.model.checkpoint import EMBEDDING, Checkpoint
from engine.model.config import ModelConfig, NormPlacement, QkNorm
from engine.model.kv_scales import KvScale, KvScales, read_kv_scales
from engine.model.matrices import HEAD_MODULE, MatrixReader, WeightSource, WholeMatrices
from engine.model.rope import RopeConfig
from engine.model.rotary import rotary_order, rotary_tables
from engine.model.sharding import RankShare, Span, share_of
from engine.quantization.weight import QuantizedWeight, Weight, joined

#: Names of a layer's norms: before and after attention, before and after the MLP.
_NORM_NAMES = {
    NormPlacement.BEFORE: ("input_layernorm", "", "post_attention_layernorm", ""),
    NormPlacement.AFTER: ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    NormPlacement.AROUND: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


#: The form of a matrix: as it is read, or as a device multiplies it.
MatrixT = TypeVar("MatrixT", covariant=True)
FormT = TypeVar("FormT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[MatrixT]):
    """One decoder layer. Matrices are `[out, in]`; gate rows precede up rows.

    Norms that the family leaves out are empty. `q_norm` and `k_norm` are those of one head, or of
    all heads of this rank. Biases of the row-parallel products (out, down) are on rank 0 only, so
    that they count once.
    """

    attention_norm: Tensor
    attention_post_norm: Tensor
    qkv: MatrixT
    qkv_bias: Tensor | None
    q_norm: Tensor
    k_norm: Tensor
    v_norm: Tensor
    num_q_heads: int
    num_kv_heads: int
    out: MatrixT
    out_bias: Tensor | None
    mlp_norm: Tensor
    mlp_post_norm: Tensor
    gate_up: MatrixT
    gate_up_bias: Tensor | None
    down: MatrixT
    down_bias: Tensor | None
    output_scale: Tensor

    def formed(self, form: Callable[[MatrixT], FormT]) -> LayerWeights[FormT]:
        """The same layer with matrices of another form."""
        layer: LayerWeights[Any] = self
        return replace(
            layer,
            qkv=form(self.qkv),
            out=form(self.out),
            gate_up=form(self.gate_up),
            down=form(self.down),
        )

    def head_norms(self) -> Iterator[tuple[Tensor, int, int]]:
        """The norms of q, of k and of v, if any, each with its range of heads in the product
        `qkv`."""
        first_v = self.num_q_heads + self.num_kv_heads
        yield self.q_norm, 0, self.num_q_heads
        yield self.k_norm, self.num_q_heads, first_v
        if self.v_norm.numel():
            yield self.v_norm, first_v, first_v + self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights(Generic[MatrixT]):
    """All of a rank's weights. rotations: cos and sin of each layer, float32
    `[positions, head_dim / 2]`."""

    embedding: Tensor
    layers: tuple[LayerWeights[MatrixT], ...]
    norm: Tensor
    head: MatrixT
    rotations: tuple[tuple[Tensor, Tensor], ...]

    def formed(self, form: Callable[[MatrixT], FormT]) -> ModelWeights[FormT]:
        """The same weights with matrices of another form."""
        weights: ModelWeights[Any] = self
        layers = tuple(layer.formed(form) for layer in self.layers)
        return replace(weights, layers=layers, head=form(self.head))


class WeightLoader:
    """Reads one rank's share of a checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        share: RankShare,
        source: WeightSource,
        device: torch.device,
        matrices: MatrixReader | None = None,
    ) -> None:
        """`matrices`: reads those that may be quantised; None: none is."""
        self.config = config
        self.share = share
        self._source = source
        self._matrices = matrices or WholeMatrices(source)
        self._kv_scales: KvScales = ()
        if isinstance(source, Checkpoint):
            self._kv_scales = read_kv_scales(source, config.num_layers)
        self._device = device

    def load(self, max_positions: int, form: Callable[[Weight], FormT]) -> ModelWeights[FormT]:
        """All weights, each layer's matrices brought to a form as soon as they are read."""
        embedding, tables = self.embedding(), self.rotations(max_positions)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self.layer(i).formed(form) for i in range(self.config.num_layers)),
            norm=self.norm(),
            head=form(self.head(embedding)),
            rotations=tuple(tables[kind] for kind, _ in self.layer_kinds(max_positions)),
        )

    def rotations(self, max_positions: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of so many positions, for each different rotation of the layers."""
        tables = []
        for rope, dim in self._ropes():
            fixed = None if rope is None else rope.fixed(max_positions, dim)
            cos, sin = rotary_tables(fixed, dim, max_positions)
            tables.append((cos.to(self._device), sin.to(self._device)))
        return tables

    def layer_kinds(self, max_positions: int) -> list[tuple[int, int | None]]:
        """Of each layer: which of `rotations` it has, and its window if any context exceeds it."""
        ropes = self._ropes()
        windows = self.config.windows(max_positions)
        return [
            (ropes.index((layer.rope, dim)), window)
            for layer, (_, dim), window in zip(
                self.config.layers, self.config.kv_shapes, windows, strict=True
            )
        ]

    def embedding(self) -> Tensor:
        """This rank's rows of the vocabulary, zeros behind them up to `vocab_rows`."""
        shape, rows = self._vocabulary()
        table = self._source.read(EMBEDDING, shape, rows=rows)
        return _padded(table, self.share.vocab_rows)

    def head(self, embedding: Tensor) -> Weight:
        """Rows of the output head, which is the embedding in a tied model."""
        if self.config.tie_word_embeddings:
            return self._matrices.tied_head(embedding)
        head = self._matrices.read(HEAD_MODULE, *self._vocabulary())
        if isinstance(head, QuantizedWeight):
            return head.padded(self.share.vocab_rows)
        return _padded(head, self.share.vocab_rows)

    def norm(self) -> Tensor:
        """That of the whole model; it scales the logits, too."""
        return _scaled(self._norm("model.norm"), self.config.logit_scale)

    def layer(self, index: int) -> LayerWeights[Weight]:
        """One decoder layer."""
        config = self.config.of_layer(index)
        share = share_of(config, self.share.rank, self.share.size)
        prefix = f"model.layers.{index}."
        before, after, before_mlp, after_mlp = (
            self._norm(prefix + name) if name else torch.empty(0)
            for name in _NORM_NAMES[config.norms]
        )
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        heads = (config.num_heads * config.head_dim, _times(share.q_heads, config.head_dim))
        kv = self._kv_scales[index] if self._kv_scales else KvScale()
        gains = kv.key, 1.0 / kv.key, 1.0 / kv.value
        # What norms divide by is theirs to multiply.
        normed = (config.qk_norm is not QkNorm.NONE,) * 2 + (config.normed_values,)
        factors = tuple(1.0 if own else gain for own, gain in zip(normed, gains, strict=True))
        qkv = _attention_parts(attention, config, share)
        gate_up = self._mlp_parts(mlp)
        scale = config.residual_scale
        out_bias = self._row_bias(f"{attention}o_proj", config.out_bias)
        down_bias = self._row_bias(f"{mlp}down_proj", config.mlp_bias)
        return LayerWeights(
            attention_norm=before,
            attention_post_norm=after,
            qkv=joined(
                [_scaled_matrix(self._matrix(p), f) for p, f in zip(qkv, factors, strict=True)]
            ),
            qkv_bias=self._biases(qkv, config.qkv_bias, factors),
            q_norm=_scaled(
                self._head_norm(f"{attention}q_norm", config, config.num_heads, share.q_heads),
                gains[0],
            ),
            k_norm=_scaled(
                self._head_norm(f"{attention}k_norm", config, config.num_kv_heads, share.kv_heads),
                gains[1],
            ),
            v_norm=torch.full(
                (config.head_dim if config.normed_values else 0,), gains[2], device=self._device
            ),
            num_q_heads=share.num_q_heads,
            num_kv_heads=share.num_kv_heads,
            out=_scaled_matrix(self._columns(f"{attention}o_proj", *heads), scale * kv.value),
            out_bias=None if out_bias is None else _scaled(out_bias, scale),
            mlp_norm=before_mlp,
            mlp_post_norm=after_mlp,
            gate_up=joined([self._matrix(part) for part in gate_up]),
            gate_up_bias=self._biases(gate_up, config.mlp_bias, (1.0, 1.0)),
            down=_scaled_matrix(
                self._columns(f"{mlp}down_proj", config.intermediate_size, share.intermediate),
                scale,
            ),
            down_bias=None if down_bias is None else _scaled(down_bias, scale),
            output_scale=self._output_scale(prefix),
        )

    def _ropes(self) -> list[tuple[RopeConfig | None, int]]:
        """The rotations of the layers, each with the size of a head."""
        pairs = zip(self.config.layers, self.config.kv_shapes, strict=True)
        return list(dict.fromkeys((layer.rope, dim) for layer, (_, dim) in pairs))

    def _output_scale(self, prefix: str) -> Tensor:
        """The factor of a layer's output, where layers have one."""
        if not self.config.scaled_layers:
            return torch.empty(0)
        return self._source.read(f"{prefix}layer_scalar", (1,))

    def _mlp_parts(self, prefix: str) -> list[_TensorRows]:
        """Where the rows of gate and up lie in the checkpoint."""
        sizes, spans = [self.config.intermediate_size] * 2, [self.share.intermediate] * 2
        if self.config.fused_weights:
            return _stacked(f"{prefix}gate_up_proj", sizes, spans, [None] * 2)
        names = (f"{prefix}{name}_proj" for name in ("gate", "up"))
        return [_TensorRows(*part) for part in zip(names, sizes, spans, strict=True)]

    def _matrix(self, part: _TensorRows) -> Weight:
        shape = (part.total, self.config.hidden_size)
        matrix, order = self._matrices.read(part.name, shape, part.rows), self._row_order(part)
        if order is None:
            return matrix
        return matrix[order] if isinstance(matrix, Tensor) else matrix.take(order)

    def _biases(
        self, parts: list[_TensorRows], wanted: bool, factors: tuple[float, ...]
    ) -> Tensor | None:
        if not wanted:
            return None
        read = self._source.read
        biases = (read(f"{part.name}.bias", (part.total,), rows=part.rows) for part in parts)
        orders = (self._row_order(part) for part in parts)
        return torch.cat(
            [
                _scaled(x if order is None else x[order], factor)
                for x, order, factor in zip(biases, orders, factors, strict=True)
            ]
        )

    def _row_order(self, part: _TensorRows) -> Tensor | None:
        """The rows of q or k with each head's dimensions in the order that kernels turn; None: as
        they are."""
        if part.turned is None:
            return None
        rotary_dim, dim = part.turned
        order = rotary_order(rotary_dim, dim)
        if order is None:
            return None
        heads: Tensor = torch.arange(part.rows[1] - part.rows[0], device=self._device).unflatten(
            0, (-1, dim)
        )
        return heads[:, order.to(self._device)].flatten()

    def _vocabulary(self) -> tuple[tuple[int, int], Span]:
        """The whole shape of a table of the vocabulary, and this rank's rows."""
        return (self.config.vocab_size, self.config.hidden_size), self.share.vocab

    def _norm(self, name: str) -> Tensor:
        return self._offset(self._source.read(f"{name}.weight", (self.config.hidden_size,)))

    def _head_norm(self, name: str, config: ModelConfig, num_heads: int, heads: Span) -> Tensor:
        kind, dim = config.qk_norm, config.head_dim
        if kind is QkNorm.NONE:
            return torch.empty(0)
        if kind is QkNorm.HEAD:
            return self._offset(self._source.read(f"{name}.weight", (dim,)))
        return self._source.read(f"{name}.weight", (num_heads * dim,), rows=_times(heads, dim))

    def _offset(self, weight: Tensor) -> Tensor:
        """A norm's weight plus the offset, in float32 where there is one: 1 + w has more digits
        than w."""
        offset = self.config.norm_offset
        return weight if offset is None else weight.float() + offset

    def _columns(self, name: str, total: int, columns: Span) -> Weight:
        return self._matrices.read(name, (self.config.hidden_size, total), columns=columns)

    def _row_bias(self, name: str, wanted: bool) -> Tensor | None:
        if not wanted or self.share.rank:
            return None
        return self._source.read(f"{name}.bias", (self.config.hidden_size,))


@dataclass(frozen=True, slots=True)
class _TensorRows:
    """Rows `rows` of the tensor `name`, which has `total`; `turned`: of heads that rotate, their
    dims that do and all."""

    name: str
    total: int
    rows: Span
    turned: tuple[int, int] | None = None


def _attention_parts(prefix: str, config: ModelConfig, share: RankShare) -> list[_TensorRows]:
    """Where the rows of q, k and v lie in the checkpoint, of a model as the layer has it."""
    dim = config.head_dim
    spans = [_times(share.q_heads, dim), *[_times(share.kv_heads, dim)] * 2]
    sizes = [config.num_heads * dim, *[config.num_kv_heads * dim] * 2]
    turned = [*[(config.rotary_dim, dim)] * 2, None]
    if config.fused_weights:
        return _stacked(f"{prefix}qkv_proj", sizes, spans, turned)
    letters = "qkk" if config.layers[0].values_are_keys else "qkv"
    names = (f"{prefix}{name}_proj" for name in letters)
    return [_TensorRows(*part) for part in zip(names, sizes, spans, turned, strict=True)]


def _stacked(
    name: str, sizes: list[int], spans: list[Span], turned: Sequence[tuple[int, int] | None]
) -> list[_TensorRows]:
    """Parts of `sizes` rows, one after the other in one tensor."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _TensorRows(name, sum(sizes), (start + first, start + last), turns)
        for start, (first, last), turns in zip(starts, spans, turned, strict=True)
    ]


def _scaled(weight: Tensor, scale: float) -> Tensor:
    """The weight times `scale`, rounded once."""
    return weight if scale == 1.0 else (weight.float() * scale).to(weight.dtype)


def _scaled_matrix(weight: Weight, scale: float) -> Weight:
    return weight.scaled(scale) if isinstance(weight, QuantizedWeight) else _scaled(weight, scale)


def _padded(table: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - table.shape[0]
    if missing == 0:
        return table
    return torch.cat((table, table.new_zeros(missing, table.shape[1])))


def _times(span: Span, factor: int) -> Span:
    return span[0] * factor, span[1] * factor
