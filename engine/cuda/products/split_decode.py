"""Decode steps of some dozens of rows: every product on the engine's own kernel, norms within.

Five kernels a layer, as for one row, each of which begins while the one before still runs: the
products after attention and after the MLP leave the sums of squares that the next norm needs, and
the product behind that norm scales its rows by them. Products whose weights are e4m3 codes take
codes, which the product before or attention leaves; those of mixed steps' attention, and of heads
that have no scale of their own, take a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.attention import DecodeAttention, LayerAttention
from engine.cuda.products.matrices import Matrix
from engine.cuda.products.single import (
    PAIR_ROWS,
    SplitProducts,
    form_for,
    matrices_of,
    takes_codes,
    takes_one_row,
)
from engine.kernels.activation import Activation
from engine.kernels.triton.coded import CODE_GROUP, CodedRows, CodedWeight
from engine.kernels.triton.codes import row_codes
from engine.kernels.triton.elementwise import rms_norm
from engine.kernels.triton.split_linear import MAX_ROWS, NextInput, shape_for
from engine.model.weights import LayerWeights, ModelWeights

#: Fewer rows than this stay with the kernel of one row, where it takes all weights.
MIN_ROWS = 2


class SplitDecode:
    """One rank's products; calls only put work on the current stream."""

    def __init__(
        self,
        weights: ModelWeights[Matrix],
        eps: float,
        products: SplitProducts,
        *,
        pdl: bool,
        activation: Activation = Activation.SILU,
        post_norms: bool = False,
    ) -> None:
        """Serves steps of 2 to `products.max_rows` rows, if the device and the sizes of all
        products allow it, of one row, too, where no other kernel does: whole ones with `logits`,
        or, with post_norms, single products."""
        self._few = weights
        self._more = weights.formed(lambda matrix: form_for(PAIR_ROWS + 1, matrix))
        self._eps = eps
        self._products = products
        self._activation = activation
        self._post_norms = post_norms
        self._pdl = pdl
        matrices = list(matrices_of(weights))
        self._min_rows = MIN_ROWS if all(takes_one_row(x) for x, _ in matrices) else 1
        self._possible = (
            products.max_rows >= MIN_ROWS
            and weights.layers[0].gate_up_bias is None
            and all(
                self._chains(min(products.max_rows, rows))
                for rows in (PAIR_ROWS, products.max_rows)
            )
        )

    def _chains(self, rows: int) -> bool:
        """Whether the kernel does all products of so many rows, one after the other."""
        weights = self._weights(rows)
        return all(
            self._products.can(rows, form_for(rows, matrix), gated=gated)
            for matrix, gated in matrices_of(weights)
        ) and all(self._leaves_codes(rows, index) for index in range(len(weights.layers)))

    def _weights(self, rows: int) -> ModelWeights[Matrix]:
        return self._few if rows <= PAIR_ROWS else self._more

    def _leaves_codes(self, rows: int, index: int) -> bool:
        """Whether products of a layer have tiles of a scale's columns where they leave codes."""
        weights = self._weights(rows)
        layers = weights.layers
        layer = layers[index]
        after = layers[index + 1].qkv if index + 1 < len(layers) else weights.head
        pairs = (
            (layer.out, False, layer.gate_up),
            (layer.gate_up, True, layer.down),
            (layer.down, False, after),
        )
        return all(
            self._tile(rows, first, gated) == CODE_GROUP
            for first, gated, second in pairs
            if takes_codes(second)
        )

    def _tile(self, rows: int, weight: Matrix, gated: bool) -> int:
        shape = shape_for(rows, weight, gated=gated)
        return 0 if shape is None else shape.block_n

    def serves(self, rows: int) -> bool:
        """Whether steps of so many rows are to run here."""
        return self._possible and self._min_rows <= rows <= self._products.max_rows

    def multiplies(self, rows: int) -> bool:
        """Whether single products of such a step run here."""
        return self._post_norms and self.serves(rows)

    def gates(self, rows: int) -> bool:
        """Whether `gated` is to be used where `logits` is not: in all steps that it serves with
        post_norms; above 64 rows it beats cuBLAS and a kernel for the activation where its tiles
        fill the card without sharing one."""
        weight = self._few.layers[0].gate_up
        if self.multiplies(rows):
            return True
        if not self._possible or isinstance(weight, CodedWeight) or not 64 < rows <= MAX_ROWS:
            return False
        shape = shape_for(rows, weight, gated=True)
        return shape is not None and shape.splits == 1

    def gated(self, x: Tensor, weight: Matrix) -> Tensor:
        """act(x gate^T) * (x up^T)."""
        weight = form_for(x.shape[0], weight)
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        inputs = self._products.input_for(x, weight)
        self._products(inputs, weight, out=out, gated=True, activation=self._activation)
        return out

    def product(self, x: Tensor, weight: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
        """out = x weight^T + bias."""
        self._products(x, weight, bias=bias, out=out)

    def logits(self, h: Tensor, attention: LayerAttention, out: Tensor) -> Tensor:
        """out = the logits of embedded rows h."""
        products, rows = self._products, h.shape[0]
        weights = self._weights(rows)
        head = form_for(rows, weights.head)
        following = [layer.qkv for layer in weights.layers[1:]] + [head]
        gains = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        x = self._normed(h, weights.layers[0])
        squares = None
        for index, layer in enumerate(weights.layers):
            if index == len(gains) - 1:
                attention.check(h)
            qkv = h.new_empty(rows, layer.qkv.shape[0])
            products(x, layer.qkv, out=qkv, bias=layer.qkv_bias, squares=squares, eps=self._eps)
            attention.write_kv(index, qkv)
            attended = self._attended(index, qkv, attention, layer.out)
            after = self._following(h, layer.out, layer.gate_up, layer.mlp_norm)
            products(attended, layer.out, out=h, bias=layer.out_bias, residual=h, following=after)
            act = products.room(rows, layer.down, h)
            products(
                after.x,
                layer.gate_up,
                out=act,
                squares=after.squares,
                eps=self._eps,
                gated=True,
                activation=self._activation,
            )
            after = self._following(h, layer.down, following[index], gains[index])
            products(act, layer.down, out=h, bias=layer.down_bias, residual=h, following=after)
            x, squares = after.x, after.squares
        products(x, head, out=out, squares=squares, eps=self._eps)
        return out

    def _attended(
        self, index: int, qkv: Tensor, attention: LayerAttention, weight: Matrix
    ) -> Tensor | CodedRows:
        """Attention as the product after it takes it."""
        if takes_codes(weight) and isinstance(attention, DecodeAttention):
            codes = CodedRows.grouped(qkv.shape[0], weight.shape[1], qkv.device)
            if attention.leave_codes(index, qkv, codes):
                return codes
        return self._products.input_for(attention.attend(index, qkv), weight)

    def _normed(self, h: Tensor, layer: LayerWeights[Matrix]) -> Tensor | CodedRows:
        x = self._products.room(h.shape[0], layer.qkv, h)
        if isinstance(x, CodedRows):
            row_codes(h, out=x, gain=layer.attention_norm, eps=self._eps, pdl=self._pdl)
        else:
            rms_norm(h, layer.attention_norm, self._eps, out=x, pdl=self._pdl)
        return x

    def _following(self, h: Tensor, weight: Matrix, after: Matrix, gain: Tensor) -> NextInput:
        """What the product with `weight` leaves for the one with `after`."""
        rows = h.shape[0]
        shape = shape_for(rows, weight)
        assert shape is not None
        tiles = weight.shape[0] // shape.block_n
        squares = torch.empty(tiles, MAX_ROWS, dtype=torch.float32, device=h.device)
        return NextInput(gain=gain, x=self._products.room(rows, after, h), squares=squares)
