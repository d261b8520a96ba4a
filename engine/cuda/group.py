"""Tensor-parallel collectives over NVLink: symmetric memory for small tensors, NCCL for large ones.

Every decode step reduces twice a layer, so latency counts. torch's symmetric-memory kernels read
the peers' buffers directly: one-shot (everybody reads everything) for the smallest sizes, two-shot
(reduce-scatter, then gather) above. NVLink multicast is never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from engine.errors import RankLost


class ReduceKind(StrEnum):
    """How an all-reduce is done."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceTable:
    """Which all-reduce serves which size: one-shot up to `one_shot` bytes, two-shot up to
    `two_shot`, NCCL above."""

    one_shot: int
    two_shot: int

    def kind(self, num_bytes: int, size: int) -> ReduceKind:
        """The all-reduce for a tensor; symmetric memory works in units of 16 bytes a rank."""
        if num_bytes > self.two_shot or num_bytes % (16 * size):
            return ReduceKind.NCCL
        return ReduceKind.ONE_SHOT if num_bytes <= self.one_shot else ReduceKind.TWO_SHOT


def reduce_table(size: int) -> ReduceTable:
    """Crossovers measured on NVLink-connected Hopper cards, inside CUDA graphs."""
    if size == 2:
        return ReduceTable(one_shot=256 << 10, two_shot=8 << 20)
    return ReduceTable(one_shot=64 << 10, two_shot=8 << 20)


class DeviceGroup:
    """One rank of a group of GPUs of one host; never torch.distributed's process-wide default."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        *,
        name: str,
        timeout_s: float = 60.0,
        table: ReduceTable | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._table = table or reduce_table(size)
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._nccl: Any = nccl(c10d.PrefixStore(f"{name}/nccl", store), rank, size, options)
            torch.cuda.set_device(device)
            self._nccl.allreduce([torch.zeros(1, device=device)]).wait()
            self._buffer = self._symmetric(c10d.PrefixStore(f"{name}/symm", store), device)
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank}: the GPU group did not form: {error}", param="tp"
            ) from error

    def _symmetric(self, store: Any, device: torch.device) -> Tensor:
        """Memory that all ranks can address."""
        memory: Any = _SymmetricMemory
        # Symmetric memory finds its peers through a group registered under a name.
        group: Any = c10d.ProcessGroup(store, self.rank, self.size)
        group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, self._nccl)
        group._set_group_name(self._name)
        c10d._register_process_group(self._name, group)
        buffer: Tensor = memory.empty_strided_p2p(
            (self._table.two_shot,), (1,), torch.uint8, device, self._name
        )
        memory.rendezvous(buffer, self._name)
        return buffer

    def partial(self, h: Tensor) -> Tensor:
        """A view of the symmetric buffer while `h` is small, `h` itself above."""
        if self._table.kind(h.nbytes, self.size) is ReduceKind.NCCL:
            return h
        return self.shared_like(h)

    def shared_like(self, h: Tensor) -> Tensor:
        """The start of the symmetric buffer, in the shape and dtype of `h`."""
        return self._buffer[: h.nbytes].view(h.dtype).view(h.shape)

    def reduce(self, partial: Tensor, h: Tensor) -> None:
        """h = the sum of all ranks' partial sums, the same bits on every rank."""
        self.reduce_by(self._table.kind(h.nbytes, self.size), partial, h)

    def reduce_by(self, kind: ReduceKind, partial: Tensor, h: Tensor) -> None:
        """`reduce` in a given way; for NCCL `partial` is `h`, else the symmetric buffer."""
        if kind is ReduceKind.NCCL:
            self._nccl.allreduce([h]).wait()
        elif kind is ReduceKind.ONE_SHOT:
            torch.ops.symm_mem.one_shot_all_reduce_out(partial, "sum", self._name, h)
        elif hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"):
            torch.ops.symm_mem.two_shot_all_reduce_out(partial, "sum", self._name, h)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", self._name)
            h.copy_(partial)

    def gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]` on every rank, by NCCL."""
        out = x.new_empty(self.size, *x.shape)
        self._nccl._allgather_base(out, x.contiguous()).wait()
        return out

    def close(self) -> None:
        """Leave the group; operations still in flight are given up."""
        c10d._unregister_process_group(self._name)
        self._nccl.abort()
