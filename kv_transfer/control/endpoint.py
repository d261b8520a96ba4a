"""What both sides of the hand-off do alike: which are live and which over, deadlines, ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from concurrency.deadlines import Deadlines
from concurrency.tasks import Tasks
from kv_transfer.control.calls import CallResult
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.finished_handoffs import Attempts, BoundedMap, FinishedHandoff
from kv_transfer.control.stats import TransferStats
from kv_transfer.plan.handoff_state import HandoffState, Verdict
from protocol.errors import BatonError, ErrorInfo, HandoffFailed, StaleMessage, Unavailable
from protocol.ids import RequestKey, WorkerRef
from protocol.messages import HandoffEnd
from protocol.ticket import Ticket
from rpc import methods

_CLOSE_GRACE_S = 3.0


class HasHandoff(Protocol):
    """A record of one hand-off in progress."""

    @property
    def lease(self) -> HandoffState:
        """Its life."""
        ...


H = TypeVar("H", bound=HasHandoff)
P = TypeVar("P", bound=FinishedHandoff)


class Endpoint(ABC, Generic[H, P]):
    """All hand-offs of one worker. H: its records of those in progress, P: of those that are over.

    Every method belongs to the event loop that it was made on: from another thread go through
    `loop.call_soon_threadsafe`. Only the methods that are coroutines wait for anything.
    """

    def __init__(self, party: EndpointContext) -> None:
        self.stats = TransferStats()
        self._me = party
        self._config = party.config
        self._clock = party.clock
        self._tasks = Tasks()
        self._live: dict[RequestKey, H] = {}
        self._past: BoundedMap[RequestKey, P] = BoundedMap(party.config.remembered)
        self._attempts = Attempts(party.config.remembered)
        self._deadlines = Deadlines(
            now=self._clock.monotonic,
            ring=lambda: self.expire(self._clock.monotonic()),
            alive=self._live.__contains__,
        )

    @property
    def num_live(self) -> int:
        """Hand-offs that are expected or in progress."""
        return len(self._live)

    def expire(self, now: float) -> None:
        """End every hand-off whose deadline has come (monotonic seconds). Called by a timer,
        too."""
        for key in self._deadlines.due(now):
            handoff = self._live.get(key)
            if handoff is None:
                continue
            if handoff.lease.deadline <= now:
                self._end_key(key, HandoffFailed(f"hand-off of {key} passed its deadline"))
            else:
                self._look_at(handoff, now)

    async def close(self) -> None:
        """End everything, tell the peers if they listen, and stop."""
        for key in list(self._live):
            self._end_key(key, Unavailable(f"the {self._me.ref.role} worker stops"))
        self._deadlines.close()
        await self._tasks.wind_up(_CLOSE_GRACE_S)

    # --- what the sides differ in ---------------------------------------------------------------

    @abstractmethod
    def _record(self, *, key: RequestKey, ticket: Ticket, peer: WorkerRef, deadline: float) -> H:
        """The record of a hand-off that begins."""

    def _look_at(self, handoff: H, now: float) -> None:
        """It asked to be looked at before its deadline."""

    @abstractmethod
    def _finish(self, handoff: H, *, released: bool, error: ErrorInfo | None, tell: bool) -> None:
        """End a hand-off without a commit, and `tell` the peer. Nothing when it is over."""

    @abstractmethod
    def _retire(self, handoff: H) -> None:
        """It is over: only remembered from now on."""

    @abstractmethod
    def _end_all(self, epoch: int, why: str) -> None:
        """End the hand-offs with the peer of this epoch, which is of no use any more."""

    # --- for both -------------------------------------------------------------------------------

    def _begin(self, key: RequestKey, ticket: Ticket, peer: WorkerRef) -> bool:
        """Take a hand-off up; False when it was before. Raises StaleMessage for a bad ticket or an
        older attempt, and the error of one that the peer has ended already."""
        if key in self._live:
            self._live[key].lease.check_same(ticket)
            return False
        past = self._past.get(key)
        if past is not None and past.peer_epoch == peer.epoch:
            over = StaleMessage(f"hand-off of {key} is over", param="key")
            raise over if past.error is None else past.error.to_error()
        self._me.check_ticket(ticket, key, peer.epoch)
        if (older := self._attempts.admit(key)) is not None:
            self._end_key(older, StaleMessage(f"{key} replaces {older}", param="attempt"))
        deadline = self._clock.monotonic() + ticket.lifetime_s
        self._live[key] = self._record(key=key, ticket=ticket, peer=peer, deadline=deadline)
        self._deadlines.add(deadline, key)
        return True

    def _shorten(self, lease: HandoffState) -> None:
        """Blocks are granted: from now on there is `lease_s` for the rest."""
        lease.deadline = min(lease.deadline, self._clock.monotonic() + self._config.lease_s)
        self._deadlines.add(lease.deadline, lease.key)

    def _end_key(self, key: RequestKey, error: BatonError) -> None:
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=False, error=error.info(), tell=True)

    def _ends(self, handoff: H, *, released: bool, error: ErrorInfo | None) -> bool:
        """Count an end and remember the hand-off; False when it was over already."""
        if handoff.lease.end(released=released, error=error) is Verdict.REPEAT:
            return False
        self._retire(handoff)
        if released:
            self.stats.released += 1
        else:
            self.stats.failures["unknown" if error is None else error.code.value] += 1
        return True

    async def _tell(self, peer: WorkerRef, end: HandoffEnd) -> CallResult:
        answer = await self._me.call(peer, methods.END, end)
        if answer.error is not None and not answer.refused:
            self._end_all(peer.epoch, "does not answer")
        return answer
