"""A receiver's records of one hand-off: in progress, and over."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

from kv_transfer.control.context import EndpointContext
from kv_transfer.control.finished_handoffs import FinishedHandoff
from kv_transfer.plan.handoff_state import OVER, InboundHandoff, PiecesLost
from protocol.errors import HandoffFailed
from protocol.messages import Grant, LinkAddress
from protocol.states import TransferState


@dataclass(slots=True, eq=False)
class Incoming:
    """One hand-off in progress. `moving` counts pieces that the ranks are receiving; `repair_by` is
    when (monotonic) to ask about a lost piece that has not come again. `backend` is the sender's
    choice, empty before the first piece."""

    lease: InboundHandoff
    moving: int = 0
    repair_by: float | None = None
    backend: str = ""
    changed: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # set on every arrival, loss and end

    @property
    def deadline(self) -> float:
        """When the next thing is due for this hand-off."""
        if self.repair_by is None or not self.lease.lost_pieces:
            return self.lease.deadline
        return min(self.lease.deadline, self.repair_by)

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing is on its way. Raises HandoffFailed when that takes too long, and
        PiecesLost when something has to come again."""
        lease = self.lease
        try:
            async with asyncio.timeout(timeout_s):
                while not lease.is_settled and lease.state not in OVER:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            if not lease.is_settled and lease.state not in OVER:  # else at the same moment
                message = f"{lease.key}: pieces did not arrive"
                raise HandoffFailed(message, param="num_pieces") from None
        if lease.lost_pieces and lease.state not in OVER:
            raise PiecesLost(lease.lost_pieces)


@dataclass(slots=True)
class Settled(FinishedHandoff):
    """What a receiver remembers of a hand-off that is over: thousands, so block ids are packed, and
    of a commit its proof is kept."""

    state: TransferState
    proof: tuple[object, ...] = ()
    block_ids: array[int] = field(default_factory=lambda: array("I"))


def settled(lease: InboundHandoff) -> Settled:
    """The memory of a hand-off that is over now."""
    commit = lease.commit_message
    return Settled(
        peer_epoch=lease.peer.epoch,
        state=lease.state,
        error=lease.error,
        proof=() if commit is None else commit.proof,
        block_ids=array("I", lease.block_ids),
    )


def grant_message(
    lease: InboundHandoff, me: EndpointContext, links: tuple[LinkAddress, ...]
) -> Grant:
    """What the sender is told of a hand-off whose blocks are reserved."""
    return Grant(
        key=lease.key,
        ticket=lease.ticket,
        decode=me.ref,
        generation=lease.generation,
        block_ids=lease.block_ids,
        num_cached_blocks=lease.num_cached,
        num_tokens=lease.num_tokens,
        layout=me.layout,
        fingerprint=me.fingerprint,
        links=links,
    )
