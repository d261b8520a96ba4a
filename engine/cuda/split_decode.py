"""Decode steps of some dozens of rows: every product on the engine's own kernel, norms within.

Five kernels a layer, as for one row, each of which begins while the one before still runs: the
products after attention and after the MLP leave the sums of squares that the next norm needs, and
the product behind that norm scales its rows by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.attention import LayerAttention
from engine.kernels.activation import Activation
from engine.kernels.triton.elementwise import rms_norm
from engine.kernels.triton.split_linear import (
    MAX_ROWS,
    NextInput,
    SplitScratch,
    block_rows,
    fits,
    scratch_sizes,
    split_linear,
    split_shape,
)
from engine.model.weights import ModelWeights
from engine.quantization.weight import Weight, dense

#: Fewer rows than this stay with torch.
MIN_ROWS = 2


class SplitDecode:
    """One rank's products; calls only put work on the current stream."""

    def __init__(
        self,
        weights: ModelWeights,
        eps: float,
        max_rows: int,
        *,
        pdl: bool,
        activation: Activation = Activation.SILU,
        post_norms: bool = False,
    ) -> None:
        """Serves steps of 2 to `max_rows` rows, if the device and the sizes of all products allow
        it: whole ones with `logits`, or, with post_norms, single products."""
        self._weights = weights
        self._eps = eps
        self._activation = activation
        self._post_norms = post_norms
        self._max_rows = max_rows
        self._pdl = pdl
        device = weights.head.device
        first = weights.layers[0]
        products = [(first.gate_up, True)]
        products += [(w, False) for w in (first.qkv, first.out, first.down, weights.head)]
        sizes = [(w.shape[0] // (1 + gated), w.shape[1], gated) for w, gated in products]
        row_blocks = sorted({block_rows(m) for m in range(MIN_ROWS, max_rows + 1)})
        counts = [(m, *size) for m in row_blocks for size in sizes]
        shapes = [split_shape(*count) for count in counts]
        sized = bool(shapes) and None not in shapes
        self._possible = sized and first.gate_up_bias is None and fits(device)
        if self._possible:
            scratch = [
                scratch_sizes(m, n, gated, shape)
                for (m, n, _, gated), shape in zip(counts, shapes, strict=True)
                if shape is not None
            ]
            tiles, floats = zip(*scratch, strict=True)
            self._scratch = SplitScratch(device, max(tiles), max(floats))

    def serves(self, rows: int) -> bool:
        """Whether steps of so many rows are to run here."""
        return self._possible and MIN_ROWS <= rows <= self._max_rows

    def multiplies(self, rows: int) -> bool:
        """Whether single products of such a step run here."""
        return self._post_norms and self.serves(rows)

    def gates(self, rows: int) -> bool:
        """Whether `gated` is to be used where `logits` is not: in all steps that it serves with
        post_norms; above 64 rows it beats cuBLAS and a kernel for the activation where its tiles
        fill the card without sharing one."""
        if self.multiplies(rows):
            return True
        n = self._weights.layers[0].down.shape[1]
        shape = split_shape(rows, n, self._weights.head.shape[1], gated=True)
        return self._possible and 64 < rows <= MAX_ROWS and shape is not None and shape.splits == 1

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """act(x gate^T) * (x up^T)."""
        return self._product(x, weight, None, gated=True)

    def product(self, x: Tensor, weight: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
        """out = x weight^T + bias."""
        self._product(x, weight, None, bias=bias, out=out)

    def logits(self, h: Tensor, attention: LayerAttention, out: Tensor) -> Tensor:
        """out = the logits of embedded rows h."""
        weights = self._weights
        gains = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        x = torch.empty_like(h)
        rms_norm(h, weights.layers[0].attention_norm, self._eps, out=x, pdl=self._pdl)
        squares = None
        for index, (layer, gain) in enumerate(zip(weights.layers, gains, strict=True)):
            if index == len(gains) - 1:
                attention.check(x)
            qkv = self._product(x, layer.qkv, squares, bias=layer.qkv_bias)
            attention.write_kv(index, qkv)
            attended = attention.attend(index, qkv)
            following = self._following(x, layer.out, layer.mlp_norm)
            self._product(attended, layer.out, None, bias=layer.out_bias, h=h, following=following)
            act = self._product(x, layer.gate_up, following.squares, gated=True)
            following = self._following(x, layer.down, gain)
            self._product(act, layer.down, None, bias=layer.down_bias, h=h, following=following)
            squares = following.squares
        return self._product(x, weights.head, squares, out=out)

    def _following(self, x: Tensor, weight: Weight, gain: Tensor) -> NextInput:
        n, k = weight.shape
        shape = split_shape(x.shape[0], n, k, gated=False)
        assert shape is not None
        tiles = n // shape.block_n
        squares = torch.empty(tiles, MAX_ROWS, dtype=torch.float32, device=x.device)
        return NextInput(gain=gain, x=x, squares=squares)

    def _product(
        self,
        x: Tensor,
        weight: Weight,
        squares: Tensor | None,
        *,
        bias: Tensor | None = None,
        h: Tensor | None = None,
        out: Tensor | None = None,
        following: NextInput | None = None,
        gated: bool = False,
    ) -> Tensor:
        """f(x weight^T + bias), in `out` if there is one, or added to h."""
        n = weight.shape[0] // (1 + gated)
        shape = split_shape(x.shape[0], n, weight.shape[1], gated)
        assert shape is not None
        if out is None:
            out = x.new_empty(x.shape[0], n) if h is None else h
        split_linear(
            x,
            dense(weight),
            self._scratch,
            shape,
            out=out,
            bias=bias,
            residual=h,
            squares=squares,
            eps=self._eps,
            following=following,
            gated=gated,
            activation=self._activation,
            pdl=self._pdl,
        )
        return out
