"""Collectives between the ranks of one engine, without torch.distributed's global group."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from engine.errors import RankLost
from engine.torch_private import gloo_group

#: How often a waiting rank checks for `abandon`.
_CHECK_INTERVAL = timedelta(seconds=1)


class TensorParallel:
    """Collectives among the ranks of one engine; no-ops when there is only one.

    All ranks call the same operations in the same order. A peer that dies or hangs raises RankLost.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._timeout_s = 0.0
        self._abandoned: RankLost | None = None
        self.num_entered = 0  # collectives so far

    def connect(self, store: Any, host: str, timeout_s: float) -> None:
        """Form the group through `store` (a torch Store); `host` is this rank's own address.
        `timeout_s` limits this and every later collective."""
        if self.size == 1:
            return
        self._timeout_s = timeout_s
        try:
            self._group = gloo_group(store, self.rank, self.size, host=host, timeout_s=timeout_s)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank}: the group did not form: {error}", param="tp"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; `x` must be contiguous."""
        if self.size > 1:
            self._wait(self._joined_group().allreduce([x], c10d.AllreduceOptions()))
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's `x`, in rank order, on rank 0; None on the others. Shapes must be equal."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = c10d.GatherOptions()
        options.rootRank = 0
        self._wait(self._joined_group().gather([parts] if parts else [], [x], options))
        return parts or None

    def abandon(self, error: RankLost) -> None:
        """Make every current and later collective raise `error`, within a second."""
        self._abandoned = error

    def close(self) -> None:
        self._group = None

    def _joined_group(self) -> Any:
        self.num_entered += 1
        if self._abandoned is not None:
            raise self._abandoned
        if self._group is None:
            raise RankLost(f"rank {self.rank} has not joined its group", param="tp")
        return self._group

    def _wait(self, work: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            over = work.is_completed()  # before the wait: it may complete as that times out
            try:
                work.wait(_CHECK_INTERVAL)
                return
            except RuntimeError as error:
                if self._abandoned is not None:
                    raise self._abandoned from error
                if over or time.monotonic() > deadline:
                    raise RankLost(
                        f"rank {self.rank}: a peer is gone: {error}", param="tp"
                    ) from error
