"""What the model asks of a tensor-parallel group on GPUs. One rank needs none of it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """Collectives of one rank, in the order of the current stream; usable inside CUDA graphs."""

    rank: int
    size: int

    def partial(self, rows: int, width: int) -> Tensor:
        """`[rows, width]`: where this rank's partial sum is to be written for `reduce`."""
        ...

    def reduce(self, partial: Tensor, out: Tensor) -> None:
        """out = the sum of all ranks' partial sums, equal on every rank."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """`[rows, n] -> [rows, n * size]`, columns in rank order, on every rank."""
        ...

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values; waits for all of them."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SingleRank:
    """The group of one."""

    rank = 0
    size = 1

    def partial(self, rows: int, width: int) -> Tensor:
        """Never asked: a single rank adds into the residual directly."""
        raise NotImplementedError("a single rank has no partial sums")

    def reduce(self, partial: Tensor, out: Tensor) -> None:
        """Never asked."""
        raise NotImplementedError("a single rank has no partial sums")

    def gather_columns(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def minimum(self, value: int) -> int:
        """`value` itself."""
        return value

    def close(self) -> None:
        """Nothing to leave."""
