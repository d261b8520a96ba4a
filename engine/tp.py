"""The tensor-parallel group: an object of its own, never torch.distributed's process-wide default."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import RankLost


class TensorParallel:
    """Collectives among the ranks of one engine; a no-op when there is only one.

    All ranks call the same operations in the same order. A peer that dies or stays silent for
    `timeout_s` surfaces as RankLost.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroupGloo | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @staticmethod
    def connect(
        store: dist.Store, rank: int, size: int, *, host: str = "127.0.0.1", timeout_s: float = 20.0
    ) -> TensorParallel:
        """Join the group of `size` ranks that meet at `store`; `host` is this rank's own address."""
        if size == 1:
            return TensorParallel()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankLost(f"rank {rank}: the group did not form: {error}", param="tp") from error
        return TensorParallel(rank, size, group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; `x` must be contiguous."""
        if self._group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            self._wait(self._group.allreduce([x], options))
        return x

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self._group is None:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._wait(self._group.allreduce([box], options))
        return int(box)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's `x`, in rank order, on rank 0; None on the others. Shapes must be equal."""
        if self._group is None:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if parts else [], [x], options))
        return parts if self.rank == 0 else None

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank}: a peer is gone: {error}", param="tp") from error
