"""Tensor-parallel collectives over NVLink: symmetric memory for small tensors, NCCL for large ones.

Every decode step reduces twice a layer, so latency counts: those sums are part of the engine's own
kernels, which write to the peers' memory. All others are torch's, which read the peers' buffers:
one-shot (every rank reads all buffers), then two-shot (reduce-scatter, then gather). NVLink
multicast is never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from engine import torch_private
from engine.cuda.comm import RankCollectives
from engine.cuda.staging import copied_size
from engine.errors import RankLost
from engine.kernels.triton.reduce import Mailboxes, NormedSum, Reduction


class ReduceKind(StrEnum):
    """Algorithm of an all-reduce."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceTable:
    """Largest size of each kind of all-reduce in bytes; NCCL above."""

    one_shot: int
    two_shot: int

    def kind(self, h: Tensor, size: int) -> ReduceKind:
        """The all-reduce for a tensor; symmetric memory works in units of 16 bytes a rank."""
        if h.nbytes > self.two_shot or h.nbytes % (16 * size):
            return ReduceKind.NCCL
        return ReduceKind.ONE_SHOT if h.nbytes <= self.one_shot else ReduceKind.TWO_SHOT


def reduce_table(size: int) -> ReduceTable:
    """Crossovers measured on four H200 with NVLink, inside CUDA graphs."""
    return ReduceTable(one_shot=1 << 20 if size == 2 else 512 << 10, two_shot=8 << 20)


#: Values of a row that ranks can sum within its product.
_ROW_CAPACITY = 1 << 14


class DeviceGroup(RankCollectives):
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
    ) -> None:
        super().__init__(rank, size)
        self._name = name
        self._table = reduce_table(size)
        self._num_reductions = 0
        try:
            prefixed = c10d.PrefixStore(f"{name}/nccl", store)
            self._nccl: Any = torch_private.nccl_group(prefixed, rank, size, timeout_s=timeout_s)
            torch.cuda.set_device(device)
            prefixed = c10d.PrefixStore(f"{name}/symm", store)
            self._group = torch_private.register(name, prefixed, rank, size, device, self._nccl)
            self._boxes = self._make_mailboxes(device)
            self._buffer, buffers = self._symmetric(self._table.two_shot, device)
            self._normed, outs = self._symmetric(self._table.two_shot, device)
            self._signals, signals = self._symmetric(4 * (size + 1), device)
            self._addresses = torch.tensor([buffers, outs, signals], device=device)
            # No rank may write to a mailbox before its owner has zeroed it.
            self._nccl.allreduce([torch.zeros(1, device=device)]).wait()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank}: the GPU group did not form: {error}", param="tp"
            ) from error

    def _symmetric(self, num_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        """Zeroed memory that all ranks can address, and the address of each rank's."""
        memory = torch_private.symmetric_memory()
        buffer: Tensor = memory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, device, self._name
        )
        buffer.zero_()
        handle = memory.rendezvous(buffer, self._name)
        return buffer, list(handle.buffer_ptrs)

    def _make_mailboxes(self, device: torch.device) -> Mailboxes:
        self._mailbox, addresses = self._symmetric(16 * self.size * _ROW_CAPACITY, device)
        return Mailboxes(
            addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
            done=torch.zeros(1, dtype=torch.int32, device=device),
            failed=torch.zeros(copied_size(1), dtype=torch.int32, device=device),
            capacity=_ROW_CAPACITY,
            rank=self.rank,
            size=self.size,
        )

    @property
    def failed(self) -> Tensor:
        """int32; the first is nonzero after a wait for a peer timed out."""
        return self._boxes.failed

    def partial(self, h: Tensor) -> Tensor:
        """Destination of the partial sum of `h`."""
        return self.partial_for(self._table.kind(h, self.size), h)

    def partial_for(self, kind: ReduceKind, h: Tensor) -> Tensor:
        """`h` itself for NCCL, else a buffer in its shape and dtype."""
        if kind is ReduceKind.NCCL:
            return h
        return self._buffer[: h.nbytes].view(h.dtype).view(h.shape)

    def reduce(self, partial: Tensor, h: Tensor) -> None:
        """Set h to the sum of all ranks' partial sums, bitwise equal on every rank."""
        self.reduce_by(self._table.kind(h, self.size), partial, h)

    def reduce_by(self, kind: ReduceKind, partial: Tensor, h: Tensor) -> None:
        """`reduce` of a given kind; `partial` is the result of `partial_for`."""
        if kind is ReduceKind.NCCL:
            self._nccl.allreduce([h]).wait()
        elif kind is ReduceKind.ONE_SHOT:
            torch.ops.symm_mem.one_shot_all_reduce_out(partial, "sum", self._name, h)
        elif hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"):
            torch.ops.symm_mem.two_shot_all_reduce_out(partial, "sum", self._name, h)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", self._name)
            h.copy_(partial)

    def row_reduction(self, h: Tensor) -> Reduction | None:
        """A reduction through the mailboxes for one row that fits them."""
        if h.shape[0] != 1 or h.numel() > self._boxes.capacity:
            return None
        return self._next_reduction()

    def sums_to_norm(self, h: Tensor) -> bool:
        """True for several rows that fit the buffers."""
        return h.shape[0] > 1 and h.nbytes <= self._table.two_shot

    def normed_sum(self, h: Tensor) -> NormedSum:
        """All-reduce fused with the next RMSNorm; only where `sums_to_norm`."""
        partials, outs, signals = self._addresses
        return NormedSum(
            reduction=self._next_reduction(),
            partial=self._buffer[: h.nbytes].view(h.dtype).view(h.shape),
            out=self._normed[: h.nbytes].view(h.dtype).view(h.shape),
            partials=partials,
            outs=outs,
            signals=signals,
        )

    def _next_reduction(self) -> Reduction:
        self._num_reductions += 1
        return Reduction(boxes=self._boxes, index=self._num_reductions - 1)

    def end_step(self) -> None:
        """Add this step's reductions to the device's count: graphs repeat their indexes."""
        if self._num_reductions:
            self._boxes.done.add_(self._num_reductions)
            self._num_reductions = 0

    def gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]` on every rank, by NCCL."""
        out = x.new_empty(self.size, *x.shape)
        torch_private.gather(self._nccl, out, x.contiguous())
        return out

    def close(self) -> None:
        """Leave the group; aborts operations in flight."""
        torch_private.unregister(self._name)
        self._nccl.abort()
