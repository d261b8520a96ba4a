"""A receiver's records of one hand-off: in progress, and over; and of its sender, that it writes no
more."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kv_transfer.backends.host import has_ended, has_followers
from kv_transfer.control.context import CallResult, EndpointContext
from kv_transfer.control.endpoint import FinishedHandoff
from kv_transfer.plan.handoff_state import OVER, InboundHandoff, PiecesLost
from protocol.errors import HandoffFailed, Internal
from protocol.ids import WorkerRef
from protocol.states import TransferState, check_transfer


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming(InboundHandoff):
    """One hand-off in progress. `num_moving` counts pieces that the ranks are receiving. `check_by`
    is when (monotonic) to ask prefill whether it still works on this one. `backend` is the sender's
    choice, empty before the first piece."""

    num_moving: int = 0
    check_by: float | None = None
    backend: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # on each arrival, loss and end

    @property
    def waits_for_sender(self) -> bool:
        """Whether it is prefill's turn: for the first piece, or to send lost ones again."""
        return self.state is TransferState.RESERVED or bool(self.lost_pieces)

    async def settle(self, timeout_s: float) -> None:
        """Wait until no piece is on its way. Raises HandoffFailed when that takes too long, and
        PiecesLost when pieces have to be sent again."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_settled and not self.is_in(*OVER):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            if not self.is_settled and not self.is_in(*OVER):  # else at the same moment
                message = f"{self.key}: pieces did not arrive"
                raise HandoffFailed(message, param="num_pieces") from None
        if self.lost_pieces and not self.is_in(*OVER):
            raise PiecesLost(self.lost_pieces)

    def finished(self) -> FinishedIncoming:
        """What to keep of this hand-off, which is over."""
        commit = self.commit_message
        return FinishedIncoming(
            peer_epoch=self.peer.epoch,
            state=self.state,
            error=self.error,
            proof=() if commit is None else commit.proof,
            block_ids=array("I", self.block_ids),
        )


@dataclass(slots=True)
class FinishedIncoming(FinishedHandoff):
    """Kept of a hand-off that is over: by the thousand, so block ids are packed, and of a commit
    only its proof is kept."""

    state: TransferState
    proof: tuple[object, ...] = ()
    block_ids: array[int] = field(default_factory=lambda: array("I"))

    def release(self) -> bool:
        """Give a committed sequence up; False when it was not committed."""
        if self.state is not TransferState.COMMITTED:
            return False
        check_transfer(self.state, TransferState.RELEASED)
        self.state = TransferState.RELEASED
        return True


async def writer_stopped(
    ask: Callable[[], Awaitable[CallResult]], peer: WorkerRef, context: EndpointContext
) -> None:
    """Ask a sender to confirm the end until it does, without a limit: a frozen one may still write
    when it thaws.

    A sender counts as dead when for an operation's time its processes are gone from this host, or
    its address refuses connections (rpc.client: an error that names `address`; a frozen process
    still listens) and no follower is left here: a frozen one outlives rank 0.
    """
    absent_since: float | None = None
    while True:
        answer = await ask()
        if answer.error is None:
            return
        alone = not has_followers(peer.process)
        if answer.refused and not isinstance(answer.error, Internal) and alone:
            return  # its address belongs to a later epoch
        now = context.clock.monotonic()
        absent = answer.error.param == "address" and alone
        if not absent and not has_ended(peer.process):
            absent_since = None
        elif absent_since is None:
            absent_since = now
        elif now - absent_since >= context.config.op_timeout_s:
            return
        await asyncio.sleep(context.config.repair_s)
