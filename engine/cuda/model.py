"""Forward pass of every family on a GPU: one rank's share, over paged KV.

The residual stream `h` is updated in place: the products after attention and after the MLP add into
it (with several ranks, rank 0 brings it into the all-reduce). Steps of one row run five kernels a
layer, each a single stream over its weights; larger ones use cuBLAS for the products. Where a norm
stands behind a product (Gemma, OLMo 2), one kernel takes it, adds it to h and takes the next norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.attention import LayerAttention
from engine.cuda.comm import RankCollectives
from engine.cuda.products.coded_steps import CodedSteps
from engine.cuda.products.matrices import Matrix
from engine.cuda.products.single import CodedProducts, takes_one_row
from engine.cuda.products.split_decode import SplitDecode
from engine.kernels.activation import Activation
from engine.kernels.triton import elementwise
from engine.kernels.triton.coded import CodedWeight
from engine.kernels.triton.linear import linear, shared_linear
from engine.kernels.triton.reduce import reduce_normed
from engine.model.config import ModelConfig, NormPlacement, QkNorm
from engine.model.sharding import RankShare, share_of
from engine.model.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """One rank's share of a model: its sizes and what its family computes.

    It holds `num_ids` rows of the vocabulary from `first_id` on. post_norms: norms stand behind
    attention and MLP. normed_widths: of queries and keys of all ranks together, where they are
    normed over all heads.
    """

    hidden: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    first_id: int
    num_ids: int
    eps: float
    embedding_scale: float
    activation: Activation = Activation.SILU
    post_norms: bool = False
    final_softcap: float = 0.0
    normed_widths: tuple[int, int] | None = None

    @staticmethod
    def of(config: ModelConfig, share: RankShare, size: int, dtype: torch.dtype) -> RankShape:
        """`share` of a model that `size` ranks compute in `dtype`."""
        shares = [share_of(config, rank, size) for rank in range(size)]
        normed = None
        if config.qk_norm is QkNorm.ALL:
            heads = (sum(x.num_q_heads for x in shares), sum(x.num_kv_heads for x in shares))
            normed = (heads[0] * config.head_dim, heads[1] * config.head_dim)
        return RankShape(
            hidden=config.hidden_size,
            num_heads=share.num_q_heads,
            kv_heads=share.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=share.intermediate[1] - share.intermediate[0],
            first_id=share.vocab[0],
            num_ids=share.vocab[1] - share.vocab[0],
            eps=config.rms_norm_eps,
            # It has the precision of the model, as transformers rounds it.
            embedding_scale=torch.tensor(config.embedding_scale, dtype=dtype).item(),
            activation=config.activation,
            post_norms=config.norms is not NormPlacement.BEFORE,
            final_softcap=config.final_softcap or 0.0,
            normed_widths=normed,
        )

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim


class CudaModel:
    """One rank's decoder. Calls only put work on the current stream; nothing waits for it."""

    def __init__(
        self,
        weights: ModelWeights[Matrix],
        shape: RankShape,
        comm: RankCollectives,
        *,
        pdl: bool,
        split: SplitDecode | None = None,
        coded: CodedProducts | None = None,
    ) -> None:
        """`split` runs the steps that it serves, where there is one rank; `coded` the products of
        weights in codes."""
        self._weights = weights
        self._split = split
        self._coded = coded
        self._coded_steps = None
        if coded is not None and not shape.post_norms and shape.normed_widths is None:
            self._coded_steps = CodedSteps(
                weights, shape.eps, coded, activation=shape.activation, pdl=pdl
            )
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
        rows, fused = h.shape[0], not self._shape.post_norms
        if fused and self._split is not None and self._split.serves(rows):
            if kept is None:
                return self._split.logits(h, attention, out)
            logits = self._split.logits(h, attention, out.new_empty(rows, out.shape[1]))
            return torch.index_select(logits, 0, kept, out=out)
        if fused and self.comm.sums_to_norm(h):
            return self._logits_by_normed_sums(h, attention, out, kept)
        return self.logits(self.hidden(h, attention, kept), out)

    def hidden(
        self, h: Tensor, attention: LayerAttention, kept: Tensor | None = None, overhang: int = 0
    ) -> Tensor:
        """Hidden states of embedded rows h, or of the rows `kept`, for `logits`. All KV is written
        in any case. overhang: finite rows that attention wants behind the projected ones."""
        rows, layers = h.shape[0], self._weights.layers
        if self._coded_steps is not None and self._coded_steps.serves(rows):
            return self._coded_steps.hidden(h, attention, kept, overhang, self.comm)
        qkv = h.new_empty(rows + overhang, self._shape.qkv_width)
        qkv[rows:].zero_()
        gains = [*(layer.attention_norm for layer in layers[1:]), None]
        x: Tensor | None = None
        for index, (layer, gain) in enumerate(zip(layers, gains, strict=True)):
            if x is None:
                self._normed_product(h, layer.attention_norm, layer.qkv, layer.qkv_bias, qkv[:rows])
            else:
                self._product(x, layer.qkv, layer.qkv_bias, qkv[:rows])
            self._norm_heads(qkv[:rows], layer)
            attention.write_kv(index, qkv)
            last = index == len(layers) - 1
            if last:
                attention.check(h)
            if last and kept is not None and not kept.shape[0]:
                return h[:0]
            attended = attention.attend(index, qkv)
            if last and kept is not None:
                h, attended = h.index_select(0, kept), attended.index_select(0, kept)
            if self._shape.post_norms:
                x = self._finish_normed(attended, h, layer, gain)
            else:
                self._finish(attended, h, layer)
        return h

    def _finish_normed(
        self, attended: Tensor, h: Tensor, layer: LayerWeights[Matrix], gain: Tensor | None
    ) -> Tensor:
        """h += norm of attention's output projection; h += norm of the MLP of h. The input of the
        next layer's projection, normed by `gain`."""
        y = self._summed(attended, layer.out, layer.out_bias)
        x = self._add_normed(y, layer.attention_post_norm, h, layer.mlp_norm)
        y = self._summed(self._gated_product(x, layer), layer.down, layer.down_bias)
        return self._add_normed(y, layer.mlp_post_norm, h, gain)

    def _add_normed(self, y: Tensor, post: Tensor, h: Tensor, gain: Tensor | None) -> Tensor:
        """h += norm(y); the norm of h, or h where there is none before the next product."""
        gain = gain if gain is not None and gain.numel() else None
        out = h if gain is None else torch.empty_like(h)
        elementwise.add_normed(y, post, h, gain, self._shape.eps, out=out, pdl=self._pdl)
        return out

    def _summed(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """The product x weight^T + bias, summed over the ranks."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        partial = self.comm.partial(out)
        self._product(x, weight, bias, partial)
        self.comm.reduce(partial, out)
        return out

    def _norm_heads(self, qkv: Tensor, layer: LayerWeights[Matrix]) -> None:
        """Norm queries and keys over the heads of all ranks, where the family does; norms of single
        heads are part of attention."""
        widths, eps = self._shape.normed_widths, self._shape.eps
        if widths is None:
            return
        squares = qkv.new_empty(qkv.shape[0], 2, dtype=torch.float32)
        gains = layer.q_norm, layer.k_norm
        if self.comm.size > 1:
            partial = self.comm.partial(squares)
            elementwise.norm_parts(qkv, *gains, partial, eps, widths, write=True)
            self.comm.reduce(partial, squares)
        read = self.comm.size > 1
        elementwise.norm_parts(qkv, *gains, squares, eps, widths, read=read)

    def _logits_by_normed_sums(
        self, h: Tensor, attention: LayerAttention, out: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Logits where every sum over the ranks goes into the norm behind it."""
        weights = self._weights
        gains = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        x = self._normed(h, weights.layers[0].attention_norm)
        qkv = h.new_empty(h.shape[0], self._shape.qkv_width)
        for index, (layer, gain) in enumerate(zip(weights.layers, gains, strict=True)):
            if index == len(gains) - 1:
                attention.check(x)
            self._product(x, layer.qkv, layer.qkv_bias, qkv)
            attention.write_kv(index, qkv)
            attended = attention.attend(index, qkv)
            x = self._shared_product(attended, layer.out, layer.out_bias, h, layer.mlp_norm)
            act = self._gated_product(x, layer)
            x = self._shared_product(act, layer.down, layer.down_bias, h, gain)
        if kept is not None:
            x = x.index_select(0, kept)
        self._product(x, weights.head, None, out)
        return self._capped(out)

    def _shared_product(
        self, x: Tensor, weight: Matrix, bias: Tensor | None, h: Tensor, gain: Tensor
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
        scale = shape.embedding_scale
        elementwise.embed(tokens, feed, previous, table, shape.first_id, out=partial, scale=scale)
        self.comm.reduce(partial, out)
        return out

    def _normed_product(
        self, h: Tensor, gain: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor
    ) -> None:
        """out = norm(h) weight^T + bias; h itself where the family has no norm there."""
        if not gain.numel():
            self._product(h, weight, bias, out)
        elif h.shape[0] == 1 and takes_one_row(weight):
            eps = self._shape.eps
            linear(h, weight, out=out, bias=bias, gain=gain, eps=eps, pdl=self._pdl)
        else:
            self._product(self._normed(h, gain), weight, bias, out)

    def _normed(self, h: Tensor, gain: Tensor) -> Tensor:
        x = torch.empty_like(h)
        elementwise.rms_norm(h, gain, self._shape.eps, out=x, pdl=self._pdl)
        return x

    def _product(self, x: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor) -> None:
        if x.shape[0] == 1 and takes_one_row(weight):
            linear(x, weight, out=out, bias=bias, pdl=self._pdl)
        elif isinstance(weight, CodedWeight):
            assert self._coded is not None
            self._coded.product(x, weight, out=out, bias=bias)
        elif self._split is not None and self._split.multiplies(x.shape[0]):
            self._split.product(x, weight, bias=bias, out=out)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def _finish(self, attended: Tensor, h: Tensor, layer: LayerWeights[Matrix]) -> None:
        """h += attention's output projection; h += MLP of the norm of h."""
        self._add_product(attended, layer.out, layer.out_bias, h)
        if h.shape[0] == 1 and layer.gate_up_bias is None and takes_one_row(layer.gate_up):
            act = self._gated_row(h, layer, layer.mlp_norm)
        else:
            act = self._gated_product(self._normed(h, layer.mlp_norm), layer)
        self._add_product(act, layer.down, layer.down_bias, h)

    def _gated_row(self, x: Tensor, layer: LayerWeights[Matrix], gain: Tensor | None) -> Tensor:
        """The MLP's gate of one row, or of its norm."""
        act, activation = x.new_empty(1, self._shape.intermediate), self._shape.activation
        linear(
            x,
            layer.gate_up,
            out=act,
            gain=gain,
            eps=self._shape.eps,
            gated=True,
            activation=activation,
            pdl=self._pdl,
        )
        return act

    def _gated_product(self, x: Tensor, layer: LayerWeights[Matrix]) -> Tensor:
        rows, activation = x.shape[0], self._shape.activation
        if layer.gate_up_bias is None:
            if rows == 1 and takes_one_row(layer.gate_up):
                return self._gated_row(x, layer, None)
            if self._split is not None and self._split.gates(rows):
                return self._split.gated(x, layer.gate_up)
        gate_up = x.new_empty(rows, 2 * self._shape.intermediate)
        self._product(x, layer.gate_up, layer.gate_up_bias, gate_up)
        act = x.new_empty(rows, self._shape.intermediate)
        elementwise.gated_product(gate_up, out=act, activation=activation, pdl=self._pdl)
        return act

    def _add_product(self, x: Tensor, weight: Matrix, bias: Tensor | None, h: Tensor) -> None:
        """h += x weight^T + bias, summed over the ranks."""
        one_row = h.shape[0] == 1 and takes_one_row(weight)
        reduction = self.comm.row_reduction(h) if one_row else None
        if reduction is not None:
            shared_linear(x, weight, reduction, h=h, bias=bias, pdl=self._pdl)
            return
        target = self.comm.partial(h)
        residual = h if self.comm.rank == 0 else None
        if one_row:
            linear(x, weight, out=target, bias=bias, residual=residual, pdl=self._pdl)
        elif isinstance(weight, CodedWeight):
            assert self._coded is not None
            self._coded.product(x, weight, out=target, bias=bias, residual=residual)
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
        return self._capped(out)

    def _capped(self, logits: Tensor) -> Tensor:
        if self._shape.final_softcap:
            elementwise.cap_logits(logits, self._shape.final_softcap)
        return logits
