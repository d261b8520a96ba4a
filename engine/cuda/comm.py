"""What the model asks of a tensor-parallel group on GPUs."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.triton.reduce import NormedSum, ReduceTurn
from protocol.errors import Internal


class RankCollectives:
    """Collectives of one rank, in the order of the current stream; usable inside CUDA graphs.

    These move nothing: they are those of a group of one, and any rank's stand-in while the engine
    is sized and nothing that is computed counts.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def failed(self) -> Tensor | None:
        """int32 `[1]` on the device, not zero once a peer was found to be silent; or None."""
        return None

    def partial(self, h: Tensor) -> Tensor:
        """Where this rank's partial sum is to be written for `reduce`: `h` itself, or a buffer of
        its shape that the other ranks can read."""
        return h

    def reduce(self, partial: Tensor, h: Tensor) -> None:
        """h = the sum of all ranks' partial sums, the same on every rank."""

    def turn(self, h: Tensor) -> ReduceTurn | None:
        """This reduction's number, when the product before it is to sum over the ranks itself."""
        return None

    def sums_to_norm(self, h: Tensor) -> bool:
        """Whether sums of the shape of h can go straight into the norm that follows them."""
        return False

    def normed_sum(self, h: Tensor) -> NormedSum:
        """Such a reduction."""
        raise Internal("a group of one has nothing to sum")

    def end_step(self) -> None:
        """No more reductions in this step."""

    def gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: every rank's `x`, in rank order, on every rank."""
        return x.expand(self.size, *x.shape)

    def close(self) -> None:
        """Leave the group."""
