"""Linear layers split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.base import Kernels
from engine.tp import TensorParallel


class RowParallelLinear:
    """x W^T + b with W split by input columns: every rank holds a partial sum, all-reduced here.

    The bias is given on rank 0 only, so that it counts once.
    """

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, tp: TensorParallel
    ) -> None:
        self._linear = kernels.linear(weight, bias)
        self._tp = tp
        self._fuses = kernels.fuses_residual

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """(residual, delta): their sum is residual + x W^T + b; delta is None once it is added.

        Where the device fuses the sum, rank 0 brings the residual into the all-reduce.
        """
        if not self._fuses:
            return residual, self._tp.all_reduce(self._linear(x))
        first = self._tp.rank == 0
        total = self._linear.add(x, residual) if first else self._linear(x)
        return self._tp.all_reduce(total), None
