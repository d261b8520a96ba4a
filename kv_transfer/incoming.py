"""A receiver's records of one hand-off: in progress, and over."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

from kv_transfer.leases import Inbound
from protocol.errors import BatonError
from protocol.ids import WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Commit, Grant, HandoffEnd, LinkAddress, Piece
from protocol.states import TransferState


@dataclass(slots=True, eq=False)
class Incoming:
    """One hand-off in progress. `moving` counts pieces that the ranks are receiving; `repair_by` is
    when (monotonic) a lost piece must have been announced again. `backend` is the sender's choice,
    empty before the first piece; `written` are the pieces, by sequence, that it writes by
    itself."""

    lease: Inbound
    moving: int = 0
    repair_by: float | None = None
    backend: str = ""
    written: dict[int, Piece] = field(default_factory=dict)
    changed: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # set on every arrival, loss and end

    @property
    def deadline(self) -> float:
        """When the next thing is due for this hand-off."""
        if self.repair_by is None or not self.lease.has_lost:
            return self.lease.deadline
        return min(self.lease.deadline, self.repair_by)


@dataclass(slots=True)
class Settled:
    """What a receiver remembers of a hand-off that is over; thousands are kept, so block ids are
    packed."""

    peer_epoch: int
    state: TransferState
    error: BatonError | None = None
    commit: Commit | None = None
    block_ids: array[int] = field(default_factory=lambda: array("I"))


def settled(lease: Inbound) -> Settled:
    """The memory of a hand-off that is over now."""
    return Settled(
        peer_epoch=lease.peer.epoch,
        state=lease.state,
        error=lease.error,
        commit=lease.commit_message,
        block_ids=array("I", lease.block_ids),
    )


def end_message(lease: Inbound, epoch: int) -> HandoffEnd:
    """What the sender is told of a hand-off that the receiver of this epoch has ended."""
    return HandoffEnd(
        key=lease.key,
        epoch=epoch,
        released=lease.state is TransferState.RELEASED,
        error=None if lease.error is None else lease.error.info(),
    )


def grant_message(
    lease: Inbound,
    ref: WorkerRef,
    layout: KVLayout,
    fingerprint: KVFingerprint,
    links: tuple[LinkAddress, ...],
) -> Grant:
    """What the sender is told of a hand-off whose blocks are reserved."""
    return Grant(
        key=lease.key,
        ticket=lease.ticket,
        decode=ref,
        generation=lease.generation,
        block_ids=lease.block_ids,
        num_cached_blocks=lease.num_cached,
        layout=layout,
        fingerprint=fingerprint,
        links=links,
    )
