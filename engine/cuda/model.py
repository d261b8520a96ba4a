"""Llama-family forward pass on a GPU: one rank's share, over paged KV.

The residual stream `h` is updated in place: the products after attention and after the MLP add into
it (with several ranks, rank 0 brings it into the all-reduce). Steps of one row run five kernels a
layer, each a single stream over its weights; larger ones use cuBLAS for the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.comm import RankCollectives
from engine.cuda.layout import ChunkRows, DecodeRows
from engine.cuda.pieces import PromptPieces
from engine.cuda.prefill import ChunkAttention
from engine.cuda.split_decode import SplitDecode
from engine.kernels.triton import elementwise as elementwise
from engine.kernels.triton.attention import DecodeScratch, DecodeShape, decode_attention
from engine.kernels.triton.linear import linear, shared_linear
from engine.kernels.triton.reduce import reduce_normed
from engine.model.config import ModelConfig
from engine.model.sharding import RankShare
from engine.model.weights import LayerWeights, ModelWeights


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
        attention: ChunkAttention,
        *,
        pdl: bool,
        split: SplitDecode | None = None,
    ) -> None:
        """`split` runs the decode steps that it serves, where there is one rank."""
        self._weights = weights
        self._split = split
        self._shape = shape
        self.comm = comm
        self._attention = attention
        self._pdl = pdl
        self._scale = shape.attention_scale

    def decode(
        self,
        rows: DecodeRows,
        batch: int,
        previous: Tensor,
        kv: Sequence[Tensor],
        scratch: DecodeScratch,
        cut: DecodeShape,
    ) -> Tensor:
        """Logits `[batch, rows of the head]` of one token per sequence of the first rows."""
        h = self._embed(rows.tokens[:batch], rows.feed, previous)

        def attend(qkv: Tensor, layer: int) -> Tensor:
            return self._attend_decode(qkv, rows, kv[layer], scratch, cut)

        if self._split is not None and self._split.serves(batch):
            return self._split.decode(h, attend)
        if self.comm.sums_to_norm(h):
            return self._decode_shared(h, attend)
        qkv = h.new_empty(batch, self._shape.qkv_width)
        for index, layer in enumerate(self._weights.layers):
            self._qkv(h, layer, qkv)
            self._finish(attend(qkv, index), h, layer)
        return self.logits(h)

    def step(
        self,
        rows: DecodeRows,
        decodes: int,
        previous: Tensor,
        chunks: ChunkRows,
        kv: Sequence[Tensor],
        scratch: DecodeScratch,
        cut: DecodeShape,
        written: Callable[[int], None] = lambda layer: None,
        pieces: PromptPieces | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """A step with prompt chunks: (logits, hidden states).

        Logits of decode rows, then of the chunks' sampled rows; hidden states of their score rows,
        for `logits`. Each is None when there are none. All KV of the step is written in any case;
        `written` is called for each layer once that layer's is on the stream. `pieces`: graphs of
        what lies between the layers' attention; for packed chunks without decodes, of one rank.
        """
        sampled = decodes + chunks.sample_rows.shape[0]
        wanted = sampled + chunks.score_rows.shape[0]
        attended: Tensor | None = None
        if pieces is None:
            h = self._embed(chunks.tokens, chunks.feed, previous)
            if decodes:
                h = torch.cat((self._embed(rows.tokens[:decodes], rows.feed, previous), h))
            wide = h.new_empty(h.shape[0] + chunks.padding, self._shape.qkv_width)
            wide[h.shape[0] :].zero_()
        else:
            h, attended, wide = pieces.begin(chunks)
            self._embed(chunks.tokens, chunks.feed, previous, out=h)
        for index, layer_kv in enumerate(kv):
            if pieces is None:
                self.between(index, kv, h, attended, wide, chunks.positions, chunks.slots)
            else:
                pieces.replay(h.shape[0], index)
            if decodes == 0:
                written(index)
            if index == len(kv) - 1 and not wanted:
                return None, None
            out = None if pieces is None else attended
            attended = self._attention(wide[decodes:], layer_kv, chunks, out)
            if decodes:
                first = self._attend_decode(wide[:decodes], rows, layer_kv, scratch, cut)
                attended = torch.cat((first, attended))
                written(index)
        assert attended is not None
        kept = self._kept_rows(decodes, chunks)
        h = h[kept]
        self._finish(attended[kept], h, self._weights.layers[-1])
        logits = self.logits(h[:sampled]) if sampled else None
        return logits, h[sampled:] if chunks.score_rows.shape[0] else None

    def between(
        self,
        index: int,
        kv: Sequence[Tensor],
        h: Tensor,
        attended: Tensor | None,
        wide: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        """What a step with prompt chunks does between the attention of the layer before, which gave
        `attended`, and that of layer `index`, which wants the rows of h projected in `wide`. The
        last rows of h are the chunks'."""
        if attended is not None and index:
            self._finish(attended, h, self._weights.layers[index - 1])
        self._qkv(h, self._weights.layers[index], wide[: h.shape[0]])
        elementwise.rope_write(
            wide[h.shape[0] - positions.shape[0] :],
            self._weights.cos,
            self._weights.sin,
            positions,
            slots,
            kv[index],
            self._shape.num_heads,
        )

    def _decode_shared(self, h: Tensor, attend: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Logits of embedded rows h where every sum over the ranks goes into the norm behind it."""
        weights = self._weights
        gains = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        x = self._normed(h, weights.layers[0].attention_norm)
        qkv = h.new_empty(h.shape[0], self._shape.qkv_width)
        for index, (layer, gain) in enumerate(zip(weights.layers, gains, strict=True)):
            self._product(x, layer.qkv, layer.qkv_bias, qkv)
            x = self._shared_product(
                attend(qkv, index), layer.out, layer.out_bias, h, layer.mlp_norm
            )
            act = self._gated_product(x, layer)
            x = self._shared_product(act, layer.down, layer.down_bias, h, gain)
        out = h.new_empty(h.shape[0], weights.head.shape[0])
        self._product(x, weights.head, None, out)
        return out

    def _shared_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, gain: Tensor
    ) -> Tensor:
        """h += x weight^T + bias, summed over the ranks; the norm of it."""
        into = self.comm.normed_sum(h)
        self._product(x, weight, bias, into.partial)
        reduce_normed(into, h, gain, self._shape.eps, pdl=self._pdl)
        return into.out

    def _kept_rows(self, decodes: int, chunks: ChunkRows) -> Tensor:
        if decodes == 0 and chunks.score_rows.shape[0] == 0:
            return chunks.sample_rows
        first = torch.arange(decodes, device=chunks.sample_rows.device)
        return torch.cat((first, chunks.sample_rows + decodes, chunks.score_rows + decodes))

    def _embed(
        self, tokens: Tensor, feed: Tensor, previous: Tensor, out: Tensor | None = None
    ) -> Tensor:
        table, shape = self._weights.embedding, self._shape
        if out is None:
            out = table.new_empty(tokens.shape[0], shape.hidden)
        partial = self.comm.partial(out)
        elementwise.embed(tokens, feed, previous, table, shape.first_id, out=partial)
        self.comm.reduce(partial, out)
        return out

    def _qkv(self, h: Tensor, layer: LayerWeights, out: Tensor) -> None:
        self._normed_product(h, layer.attention_norm, layer.qkv, layer.qkv_bias, out)

    def _normed_product(
        self, h: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """out = norm(h) weight^T + bias."""
        if h.shape[0] == 1:
            eps = self._shape.eps
            linear(h, weight, out=out, bias=bias, gain=gain, eps=eps, pdl=self._pdl)
            return
        self._product(self._normed(h, gain), weight, bias, out)

    def _normed(self, h: Tensor, gain: Tensor) -> Tensor:
        x = torch.empty_like(h)
        elementwise.rms_norm(h, gain, self._shape.eps, out=x, pdl=self._pdl)
        return x

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def _attend_decode(
        self, qkv: Tensor, rows: DecodeRows, kv: Tensor, scratch: DecodeScratch, cut: DecodeShape
    ) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self._shape.num_heads * self._shape.head_dim)
        decode_attention(
            qkv,
            self._weights.cos,
            self._weights.sin,
            kv,
            rows.indptr,
            rows.blocks,
            rows.lengths,
            scratch,
            cut,
            num_heads=self._shape.num_heads,
            scale=self._scale,
            out=out,
            pdl=self._pdl,
        )
        return out

    def _finish(self, attended: Tensor, h: Tensor, layer: LayerWeights) -> None:
        """h += attention's output projection; h += MLP of the norm of h."""
        self._add_product(attended, layer.out, layer.out_bias, h)
        if h.shape[0] == 1 and layer.gate_up_bias is None:
            act = h.new_empty(1, self._shape.intermediate)
            linear(
                h,
                layer.gate_up,
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
            return self._split.gated(x, layer.gate_up)
        gate_up = x.new_empty(x.shape[0], 2 * self._shape.intermediate)
        self._product(x, layer.gate_up, layer.gate_up_bias, gate_up)
        act = x.new_empty(x.shape[0], self._shape.intermediate)
        elementwise.silu_mul(gate_up, out=act, pdl=self._pdl)
        return act

    def _add_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor) -> None:
        """h += x weight^T + bias, summed over the ranks."""
        turn = self.comm.turn(h)
        if turn is not None:
            shared_linear(x, weight, turn, h=h, bias=bias, pdl=self._pdl)
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

    def logits(self, h: Tensor) -> Tensor:
        """Logits of this rank's rows of the vocabulary, padding rows included."""
        head = self._weights.head
        out = h.new_empty(h.shape[0], head.shape[0])
        self._normed_product(h, self._weights.norm, head, None, out)
        return out
