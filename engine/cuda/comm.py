"""Collectives of a tensor-parallel group on GPUs: the interface, and a group of one."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.triton.reduce import NormedSum, Reduction
from protocol.errors import Internal


class RankCollectives:
    """Collectives of one rank, in the order of the current stream; usable inside CUDA graphs.

    These move nothing: a group of one uses them, and every rank while working memory is measured.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def failed(self) -> Tensor | None:
        """int32 `[1]` on the device, nonzero after a wait for a peer timed out; or None."""
        return None

    def partial(self, h: Tensor) -> Tensor:
        """Destination of this rank's partial sum for `reduce`: `h` itself, or a buffer of its shape
        that the other ranks can read."""
        return h

    def reduce(self, partial: Tensor, h: Tensor) -> None:
        """Set h to the sum of all ranks' partial sums, bitwise equal on every rank."""

    def row_reduction(self, h: Tensor) -> Reduction | None:
        """A reduction that the product before it computes itself; None where it cannot."""
        return None

    def sums_to_norm(self, h: Tensor) -> bool:
        """Whether the all-reduce of h is fused with the RMSNorm behind it."""
        return False

    def normed_sum(self, h: Tensor) -> NormedSum:
        """All-reduce fused with the next RMSNorm."""
        raise Internal("a group of one has nothing to sum")

    def end_step(self) -> None:
        """Mark the end of a step's reductions."""

    def gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: every rank's `x`, in rank order, on every rank."""
        return x.expand(self.size, *x.shape)

    def close(self) -> None:
        """Leave the group."""
