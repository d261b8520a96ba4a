"""Memory of sums over ranks, and the typed wrapper of the all-reduce fused with an RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.jit.reduce import sum_and_norm
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.launch import ceil_div, power_of_2

#: Polls of a silent peer before a reduction times out: seconds, where microseconds are usual.
MAX_POLLS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailboxes:
    """What one rank needs for reductions of up to `capacity` values of a row.

    addresses: int64 `[size]`, every rank's mailbox as this rank addresses it, each int64
    `[2, size, capacity]` and zero at first; done: int32, the reductions of all steps before, zero
    at first; failed: int32 zero, set to one for good when a peer has stayed silent for seconds.
    """

    addresses: torch.Tensor
    done: torch.Tensor
    failed: torch.Tensor
    capacity: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One reduction: number `index` of its step."""

    boxes: Mailboxes
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSum:
    """One reduction that goes straight into a norm: where this rank's partial sums are to be
    written, and where the norm of the sum will be; both `[rows, hidden]`.

    partials, outs, signals: int64 `[size]`, the addresses of every rank's; the signals are int32
    `[size + 1]`, zero at first.
    """

    reduction: Reduction
    partial: torch.Tensor
    out: torch.Tensor
    partials: torch.Tensor
    outs: torch.Tensor
    signals: torch.Tensor


def reduce_normed(
    into: NormedSum, h: torch.Tensor, gain: torch.Tensor, eps: float, *, pdl: bool = False
) -> None:
    """into.out = rms(h + the sum over ranks of into.partial) * gain, the same bits on every rank.

    h `[rows, hidden]` becomes that sum in the rows that this rank owns; the others are not kept.
    """
    rows, hidden = h.shape
    boxes = into.reduction.boxes
    block = power_of_2(hidden)
    sum_and_norm[(ceil_div(rows, boxes.size),)](
        into.partials,
        into.outs,
        into.signals,
        h,
        gain,
        boxes.done,
        boxes.failed,
        eps,
        into.reduction.index,
        MAX_POLLS,
        boxes.rank,
        rows,
        hidden,
        BLOCK=block,
        SIZE=boxes.size,
        SIZE_P=power_of_2(boxes.size),
        PDL=pdl,
        num_warps=min(16, max(4, block // 512)),
        **launch_options(pdl),
    )
