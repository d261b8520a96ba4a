"""Steps of many rows whose products are all of e4m3 codes.

Every product's input becomes codes, with a scale for each row, in the kernel that makes it: the
norm, which also adds what the product before has left to the residual stream, and the activation.
Only the output of attention takes a kernel of its own. Of some hundreds of rows the library's
product is faster without scales, which the norm behind it applies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.attention import LayerAttention
from engine.cuda.comm import RankCollectives
from engine.cuda.products.matrices import Matrix
from engine.cuda.products.single import CodedProducts, many_room, multiplies_many
from engine.kernels.activation import Activation
from engine.kernels.triton.coded import CodedRows, CodedWeight, Sums
from engine.kernels.triton.codes import gated_codes, row_codes
from engine.model.weights import ModelWeights

#: Up to so many rows the products that norms read are scaled by these.
_SUMS_ROWS = 256


class CodedSteps:
    """One rank's layers; calls only put work on the current stream."""

    def __init__(
        self,
        weights: ModelWeights[Matrix],
        eps: float,
        products: CodedProducts,
        *,
        activation: Activation,
        pdl: bool,
    ) -> None:
        self._weights = weights
        self._eps = eps
        self._products = products
        self._activation = activation
        self._pdl = pdl
        matrices = [
            matrix
            for layer in weights.layers
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        biases = [bias for layer in weights.layers for bias in (layer.out_bias, layer.down_bias)]
        self._one = torch.ones((), device=weights.norm.device)
        self._possible = all(multiplies_many(matrix) for matrix in matrices)
        self._sums = all(bias is None for bias in biases) and not any(
            isinstance(matrix, CodedWeight) and matrix.by_block for matrix in matrices
        )

    def serves(self, rows: int) -> bool:
        """Whether steps of so many rows are to run here."""
        return self._possible and rows > self._products.split.max_rows

    def hidden(
        self,
        h: Tensor,
        attention: LayerAttention,
        kept: Tensor | None,
        overhang: int,
        comm: RankCollectives,
    ) -> Tensor:
        """As `CudaModel.hidden`."""
        rows, layers, eps, pdl = h.shape[0], self._weights.layers, self._eps, self._pdl
        padded = many_room(rows, layers[0].qkv, h.device).shape[0]
        buffer = h.new_empty(max(padded, rows + overhang), layers[0].qkv.shape[0])
        buffer[rows:].zero_()
        qkv = buffer[: rows + overhang]
        delta: Tensor | Sums | None = None
        sums = self._sums and comm.size == 1 and rows <= _SUMS_ROWS
        for index, layer in enumerate(layers):
            x = many_room(rows, layer.qkv, h.device)
            row_codes(h, out=x, gain=layer.attention_norm, eps=eps, delta=delta, pdl=pdl)
            self._times(x, layer.qkv, layer.qkv_bias, buffer[:padded])
            attention.write_kv(index, qkv)
            last = index == len(layers) - 1
            if last:
                attention.check(h)
            if last and kept is not None and not kept.shape[0]:
                return h[:0]
            attended = attention.attend(index, qkv)
            if last and kept is not None:
                h, attended = h.index_select(0, kept), attended.index_select(0, kept)
            codes = many_room(h.shape[0], layer.out, h.device)
            row_codes(attended, out=codes, pdl=pdl)
            delta = self._summed(codes, layer.out, layer.out_bias, h, comm, sums)
            x = many_room(h.shape[0], layer.gate_up, h.device)
            row_codes(h, out=x, gain=layer.mlp_norm, eps=eps, delta=delta, pdl=pdl)
            gate_up = self._times(x, layer.gate_up, layer.gate_up_bias)
            act = many_room(h.shape[0], layer.down, h.device)
            gated_codes(gate_up, out=act, activation=self._activation, pdl=pdl)
            delta = self._summed(act, layer.down, layer.down_bias, h, comm, sums and not last)
        if delta is None:
            return h
        assert isinstance(delta, Tensor)
        return h.add_(delta)

    def _times(
        self, x: CodedRows, weight: Matrix, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(weight, CodedWeight)
        return self._products.many(x, weight, bias, out)

    def _summed(
        self,
        x: CodedRows,
        weight: Matrix,
        bias: Tensor | None,
        h: Tensor,
        comm: RankCollectives,
        sums: bool,
    ) -> Tensor | Sums | None:
        """What is to be added to h yet: x weight^T + bias, or, of several ranks, nothing."""
        if sums:
            assert isinstance(weight, CodedWeight)
            return self._products.sums(x, weight, self._one)
        delta = self._times(x, weight, bias)[: h.shape[0]]
        if comm.size == 1:
            return delta
        target = comm.partial(h)
        if comm.rank == 0:
            torch.add(delta, h, out=target)
        else:
            target.copy_(delta)
        comm.reduce(target, h)
        return None
