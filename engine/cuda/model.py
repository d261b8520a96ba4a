"""Llama-family forward pass on a GPU: one rank's share, over paged KV.

The residual stream `h` is updated in place: the products after attention and after the MLP add into
it (with several ranks, rank 0 brings it into the all-reduce). Steps of one row run five kernels a
layer, each a single stream over its weights; larger ones use cuBLAS for the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.attention import LayerAttention
from engine.cuda.comm import RankCollectives
from engine.cuda.split_decode import SplitDecode, norm_heads
from engine.kernels.triton import elementwise
from engine.kernels.triton.linear import linear, shared_linear
from engine.kernels.triton.reduce import reduce_normed
from engine.model.config import ModelConfig
from engine.model.sharding import RankShare
from engine.model.weights import LayerWeights, ModelWeights
from engine.quantization.weight import Weight, dense


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """Sizes of one rank's share: it holds `num_ids` rows of the vocabulary from `first_id` on."""

    hidden: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    first_id: int
    num_ids: int
    eps: float
    attention_scale: float
    embedding_scale: float

    @staticmethod
    def of(config: ModelConfig, share: RankShare) -> RankShape:
        """The sizes that `share` of a model has."""
        return RankShape(
            hidden=config.hidden_size,
            num_heads=share.num_q_heads,
            kv_heads=share.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=share.intermediate[1] - share.intermediate[0],
            first_id=share.vocab[0],
            num_ids=share.vocab[1] - share.vocab[0],
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
            embedding_scale=config.embedding_scale,
        )

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim


class CudaModel:
    """One rank's decoder. Calls only put work on the current stream; nothing waits for it."""

    def __init__(
        self,
        weights: ModelWeights,
        shape: RankShape,
        comm: RankCollectives,
        *,
        pdl: bool,
        split: SplitDecode | None = None,
    ) -> None:
        """`split` runs the steps that it serves, where there is one rank."""
        self._weights = weights
        self._split = split
        self._shape = shape
        self.comm = comm
        self._pdl = pdl

    def logits_of_step(
        self,
        tokens: Tensor,
        feed: Tensor,
        previous: Tensor,
        attention: LayerAttention,
        out: Tensor,
        kept: Tensor | None = None,
    ) -> Tensor:
        """out `[rows, rows of the head]` = the logits of one token per row, or of the rows `kept`.

        Where feed[r] >= 0 row r's token is previous[feed[r]]. Puts the same work on the stream
        whenever it is called with tensors of the same shapes.
        """
        h = self.embed(tokens, feed, previous)
        rows = h.shape[0]
        if self._split is not None and self._split.serves(rows):
            if kept is None:
                return self._split.logits(h, attention, out)
            logits = self._split.logits(h, attention, out.new_empty(rows, out.shape[1]))
            return torch.index_select(logits, 0, kept, out=out)
        if self.comm.sums_to_norm(h):
            return self._logits_by_normed_sums(h, attention, out, kept)
        return self.logits(self.hidden(h, attention, kept), out)

    def hidden(
        self, h: Tensor, attention: LayerAttention, kept: Tensor | None = None, overhang: int = 0
    ) -> Tensor:
        """Hidden states of embedded rows h, or of the rows `kept`, for `logits`. All KV is written
        in any case. overhang: finite rows that attention wants behind the projected ones."""
        rows, layers = h.shape[0], self._weights.layers
        qkv = h.new_empty(rows + overhang, self._shape.qkv_width)
        qkv[rows:].zero_()
        for index, layer in enumerate(layers):
            gain, weight, bias = layer.attention_norm, layer.qkv, layer.qkv_bias
            self._normed_product(h, gain, weight, bias, qkv[:rows])
            norm_heads(qkv[:rows], layer, self._shape.eps)
            attention.write_kv(index, qkv)
            last = index == len(layers) - 1
            if last and kept is not None and not kept.shape[0]:
                return h[:0]
            attended = attention.attend(index, qkv)
            if last and kept is not None:
                h, attended = h.index_select(0, kept), attended.index_select(0, kept)
            self._finish(attended, h, layer)
        return h

    def _logits_by_normed_sums(
        self, h: Tensor, attention: LayerAttention, out: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Logits where every sum over the ranks goes into the norm behind it."""
        weights = self._weights
        gains = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        x = self._normed(h, weights.layers[0].attention_norm)
        qkv = h.new_empty(h.shape[0], self._shape.qkv_width)
        for index, (layer, gain) in enumerate(zip(weights.layers, gains, strict=True)):
            self._product(x, layer.qkv, layer.qkv_bias, qkv)
            norm_heads(qkv, layer, self._shape.eps)
            attention.write_kv(index, qkv)
            attended = attention.attend(index, qkv)
            x = self._shared_product(attended, layer.out, layer.out_bias, h, layer.mlp_norm)
            act = self._gated_product(x, layer)
            x = self._shared_product(act, layer.down, layer.down_bias, h, gain)
        if kept is not None:
            x = x.index_select(0, kept)
        self._product(x, weights.head, None, out)
        return out

    def _shared_product(
        self, x: Tensor, weight: Weight, bias: Tensor | None, h: Tensor, gain: Tensor
    ) -> Tensor:
        """h += x weight^T + bias, summed over the ranks; the norm of it."""
        into = self.comm.normed_sum(h)
        self._product(x, weight, bias, into.partial)
        reduce_normed(into, h, gain, self._shape.eps, pdl=self._pdl)
        return into.out

    def embed(self, tokens: Tensor, feed: Tensor, previous: Tensor) -> Tensor:
        """Embedded rows; see `logits_of_step`."""
        table, shape = self._weights.embedding, self._shape
        out = table.new_empty(tokens.shape[0], shape.hidden)
        partial = self.comm.partial(out)
        elementwise.embed(tokens, feed, previous, table, shape.first_id, out=partial)
        self.comm.reduce(partial, out)
        if shape.embedding_scale != 1.0:
            out.mul_(shape.embedding_scale)
        return out

    def _normed_product(
        self, h: Tensor, gain: Tensor, weight: Weight, bias: Tensor | None, out: Tensor
    ) -> None:
        """out = norm(h) weight^T + bias."""
        if h.shape[0] == 1:
            eps = self._shape.eps
            linear(h, dense(weight), out=out, bias=bias, gain=gain, eps=eps, pdl=self._pdl)
            return
        self._product(self._normed(h, gain), weight, bias, out)

    def _normed(self, h: Tensor, gain: Tensor) -> Tensor:
        x = torch.empty_like(h)
        elementwise.rms_norm(h, gain, self._shape.eps, out=x, pdl=self._pdl)
        return x

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        if bias is None:
            torch.mm(x, dense(weight).t(), out=out)
        else:
            torch.addmm(bias, x, dense(weight).t(), out=out)

    def _finish(self, attended: Tensor, h: Tensor, layer: LayerWeights) -> None:
        """h += attention's output projection; h += MLP of the norm of h."""
        self._add_product(attended, layer.out, layer.out_bias, h)
        if h.shape[0] == 1 and layer.gate_up_bias is None:
            act = h.new_empty(1, self._shape.intermediate)
            linear(
                h,
                dense(layer.gate_up),
                out=act,
                gain=layer.mlp_norm,
                eps=self._shape.eps,
                gated=True,
                pdl=self._pdl,
            )
        else:
            act = self._gated_product(self._normed(h, layer.mlp_norm), layer)
        self._add_product(act, layer.down, layer.down_bias, h)

    def _gated_product(self, x: Tensor, layer: LayerWeights) -> Tensor:
        if self._split is not None and self._split.gates(x.shape[0]):
            return self._split.gated(x, dense(layer.gate_up))
        gate_up = x.new_empty(x.shape[0], 2 * self._shape.intermediate)
        self._product(x, layer.gate_up, layer.gate_up_bias, gate_up)
        act = x.new_empty(x.shape[0], self._shape.intermediate)
        elementwise.silu_mul(gate_up, out=act, pdl=self._pdl)
        return act

    def _add_product(self, x: Tensor, weight: Weight, bias: Tensor | None, h: Tensor) -> None:
        """h += x weight^T + bias, summed over the ranks."""
        weight = dense(weight)
        reduction = self.comm.row_reduction(h)
        if reduction is not None:
            shared_linear(x, weight, reduction, h=h, bias=bias, pdl=self._pdl)
            return
        target = self.comm.partial(h)
        residual = h if self.comm.rank == 0 else None
        if h.shape[0] == 1:
            linear(x, weight, out=target, bias=bias, residual=residual, pdl=self._pdl)
        else:
            if residual is None:
                torch.mm(x, weight.t(), out=target)
            else:
                torch.addmm(residual, x, weight.t(), out=target)
            if bias is not None:
                target.add_(bias)
        self.comm.reduce(target, h)

    def logits(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of this rank's rows of the vocabulary, padding rows included; in `out`, if any."""
        head = self._weights.head
        if out is None:
            out = h.new_empty(h.shape[0], head.shape[0])
        self._normed_product(h, self._weights.norm, head, None, out)
        return out
