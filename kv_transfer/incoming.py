"""A receiver's records of one hand-off: in progress, and over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.leases import Inbound
from protocol.errors import BatonError
from protocol.messages import Commit
from protocol.states import TransferState


@dataclass(slots=True, eq=False)
class Incoming:
    """One hand-off in progress. `moving` counts pieces that the ranks are receiving; `repair_by` is
    when (monotonic) a lost piece must have been announced again."""

    lease: Inbound
    moving: int = 0
    repair_by: float | None = None
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
    """What a receiver remembers of a hand-off that is over."""

    peer_epoch: int
    state: TransferState
    error: BatonError | None = None
    commit: Commit | None = None
    block_ids: tuple[int, ...] = ()
