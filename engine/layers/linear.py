"""Linear layers split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.base import Kernels
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

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum residual + x W^T + b; rank 0 brings the residual into the all-reduce."""
        first = self._tp.rank == 0
        return self._tp.all_reduce(self._linear.add(x, residual) if first else self._linear(x))
