"""Typed wrapper of the low-latency all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.kernels.jit.reduce import push_all_reduce
from engine.kernels.triton_elementwise import launch_options

#: Words (of two bfloat16) that one program reduces.
_BLOCK = 256
#: Looks at a silent peer before a reduction is given up: seconds, where microseconds are usual.
_MAX_POLLS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailboxes:
    """What one rank needs for reductions of up to `capacity` words.

    addresses: int64 `[size]`, every rank's mailbox as this rank addresses it, each int64
    `[2, size, capacity]` and zero at first; epochs: int32 zeros, one a program; failed: int32 zero,
    set to one for good when a peer has stayed silent for seconds.
    """

    addresses: torch.Tensor
    epochs: torch.Tensor
    failed: torch.Tensor
    capacity: int
    rank: int
    size: int


def num_programs(capacity: int) -> int:
    """Programs of the largest reduction; the length of `Mailboxes.epochs`."""
    return -(-capacity // _BLOCK)


def all_reduce(
    partial: torch.Tensor, boxes: Mailboxes, *, out: torch.Tensor, pdl: bool = False
) -> None:
    """out = the sum over ranks of `partial` (bfloat16, an even number), the same bits on each.

    Sums are taken in float32, in the order of the ranks. Every rank must call this with the same
    sizes in the same order.
    """
    words = partial.numel() // 2
    push_all_reduce[(triton.cdiv(words, _BLOCK),)](
        partial.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        boxes.addresses,
        boxes.epochs,
        boxes.failed,
        words,
        _MAX_POLLS,
        CAPACITY=boxes.capacity,
        RANK=boxes.rank,
        SIZE=boxes.size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
