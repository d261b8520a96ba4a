"""Layers of the model split over tensor-parallel ranks.

The vocabulary is split by rows: every rank holds `vocab_rows` of them. Rows past the end of the
vocabulary are padding, cut off before sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.base import Kernels
from engine.model.sharding import RankShare
from engine.ranks.tensor_parallel import TensorParallel


class RowParallelLinear:
    """x W^T + b with W split by input columns: every rank holds a partial sum, all-reduced here.

    The bias is given on rank 0 only, so that it counts once.
    """

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, tp: TensorParallel
    ) -> None:
        self._linear = kernels.linear(weight, bias)
        self._tp = tp

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum residual + x W^T + b; rank 0 brings the residual into the all-reduce."""
        if residual is None:
            return self._tp.all_reduce(self._linear(x))
        first = self._tp.rank == 0
        return self._tp.all_reduce(self._linear.add(x, residual) if first else self._linear(x))


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
        self, kernels: Kernels, weight: Tensor, vocab_size: int, tp: TensorParallel
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
