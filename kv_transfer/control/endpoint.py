"""What Sender and Receiver have in common: records of hand-offs, deadlines, ends, counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from concurrency.bounded_map import BoundedMap
from concurrency.event_loop import Deadlines, Tasks
from kv_transfer.control.context import CallResult, EndpointContext
from kv_transfer.plan.handoff_state import HandoffState, Verdict
from observability import metrics
from observability.metrics import counter_key
from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    ErrorInfo,
    HandoffFailed,
    StaleMessage,
    Unavailable,
)
from protocol.ids import RequestKey, WorkerRef
from protocol.messages import HandoffEnd, Ticket
from rpc import methods

_CLOSE_GRACE_S = 3.0
K = TypeVar("K")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """Totals since the start. `failures` counts by error code; `relinked` counts broken
    channels."""

    committed: int = 0
    released: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_pieces: int = 0
    relinked: int = 0

    def counters(self) -> dict[str, int]:
        causes = {
            counter_key(metrics.HANDOFF_FAILURES, cause=cause): count
            for cause, count in self.failures.items()
        }
        return {
            counter_key(metrics.HANDOFFS, outcome="committed"): self.committed,
            counter_key(metrics.HANDOFFS, outcome="released"): self.released,
            counter_key(metrics.HANDOFF_BYTES): self.num_bytes,
            counter_key(metrics.HANDOFF_PIECES): self.num_pieces,
            counter_key(metrics.HANDOFF_RELINKS): self.relinked,
            **causes,
        }


class ChannelEnd(Protocol):
    """One end of a channel, as a ChannelMap sees it."""

    @property
    def is_idle(self) -> bool:
        """Whether no hand-off needs it now."""

    async def close(self) -> None:
        """Close its links; messages in flight on them fail."""


C = TypeVar("C", bound=ChannelEnd)


class ChannelMap(Generic[C]):
    """Channels by the peer's epoch, made on first use; the least recently used idle one is closed
    when there are more than `limit`."""

    def __init__(self, limit: int, tasks: Tasks, make: Callable[[WorkerRef], C]) -> None:
        self._limit = limit
        self._tasks = tasks
        self._make = make
        self._channels: OrderedDict[int, C] = OrderedDict()

    def get(self, peer: WorkerRef) -> C:
        """The channel to or from a peer, now the most recently used."""
        channel = self._channels.get(peer.epoch)
        if channel is None:
            surplus = len(self._channels) + 1 - self._limit
            idle = [epoch for epoch, each in self._channels.items() if each.is_idle]
            for epoch in idle[: max(0, surplus)]:
                self._tasks.start(self._channels.pop(epoch).close())
            channel = self._channels[peer.epoch] = self._make(peer)
        self._channels.move_to_end(peer.epoch)
        return channel

    def find(self, epoch: int) -> C | None:
        """The channel of an epoch, if there is one."""
        return self._channels.get(epoch)

    @property
    def is_full(self) -> bool:
        """Whether another channel would replace one."""
        return len(self._channels) >= self._limit

    async def close(self, epoch: int) -> None:
        """Close the channel of an epoch, if there is one."""
        channel = self._channels.pop(epoch, None)
        if channel is not None:
            await channel.close()


class Attempts:
    """The newest attempt seen of each request; older ones are refused."""

    def __init__(self, limit: int) -> None:
        self._newest: BoundedMap[str, int] = BoundedMap(limit)

    def admit(self, key: RequestKey) -> RequestKey | None:
        """Note an attempt; the one that it replaces, if any. Raises StaleMessage when a newer one
        was seen."""
        newest = self._newest.get(key.request_id)
        if newest is not None and key.attempt < newest:
            raise StaleMessage(f"{key} is older than attempt {newest}", param="attempt")
        self._newest.put(key.request_id, key.attempt)
        return None if newest in (None, key.attempt) else RequestKey(key.request_id, newest)


@dataclass(slots=True)
class FinishedHandoff:
    """Kept of a hand-off that is over, to recognise late messages: the peer's epoch, and why it
    failed."""

    peer_epoch: int
    error: ErrorInfo | None

    def reason(self, key: RequestKey) -> BatonError:
        """What a message for it is refused with."""
        over = StaleMessage(f"hand-off of {key} is over", param="key")
        return over if self.error is None else self.error.to_error()


H = TypeVar("H", bound=HandoffState)
F = TypeVar("F", bound=FinishedHandoff)


class Endpoint(ABC, Generic[H, F]):
    """All hand-offs of one worker. H: its records of those in progress, F: of those that are over.

    Every method belongs to the event loop that it was made on: from another thread go through
    `loop.call_soon_threadsafe`. Only coroutine methods wait for anything. `sends`: it is the
    sender's end.
    """

    sends: ClassVar[bool]

    def __init__(self, context: EndpointContext, record: type[H]) -> None:
        self.stats = TransferStats()
        self._record = record
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._tasks = Tasks()
        self._live: dict[RequestKey, H] = {}
        self._finished: BoundedMap[RequestKey, F] = BoundedMap(self._config.finished_handoffs)
        self._attempts = Attempts(self._config.finished_handoffs)
        self._deadlines = Deadlines(
            now=self._clock.monotonic,
            on_due=lambda: self.expire(self._clock.monotonic()),
            alive=self._live.__contains__,
        )

    @property
    def num_live(self) -> int:
        """Hand-offs that are expected or in progress."""
        return len(self._live)

    def expire(self, now: float) -> None:
        """End every hand-off whose deadline has come (monotonic seconds). A timer calls it, too."""
        for key in self._deadlines.due(now):
            handoff = self._live.get(key)
            if handoff is None:
                continue
            if handoff.deadline <= now:
                kind = HandoffFailed if handoff.leased else DeadlineExceeded
                self._end_key(key, kind(f"hand-off of {key} passed its deadline"))
            else:
                self._check(handoff, now)

    async def close(self) -> None:
        """End everything, tell the peers if they listen, and stop."""
        for key in list(self._live):
            self._end_key(key, Unavailable(f"worker {self._context.ref.worker_id} stops"))
        self._deadlines.close()
        await self._tasks.shutdown(_CLOSE_GRACE_S)

    # --- what Sender and Receiver differ in -----------------------------------------------------

    def _check(self, handoff: H, now: float) -> None:
        """A time before the deadline has come that was added to `_deadlines`."""

    @abstractmethod
    def _finish(self, handoff: H, *, released: bool, error: ErrorInfo | None, tell: bool) -> None:
        """End a hand-off without a commit, and `tell` the peer. Nothing when it is over."""

    @abstractmethod
    def _retire(self, handoff: H) -> None:
        """Replace the record of a hand-off that is over by a FinishedHandoff."""

    # --- for both -------------------------------------------------------------------------------

    def _begin(self, key: RequestKey, ticket: Ticket, peer: WorkerRef) -> bool:
        """Record a hand-off; False when it was recorded before. Raises StaleMessage for a bad
        ticket or an older attempt, and the error of one that the peer has ended already."""
        if key in self._live:
            self._live[key].check_same(ticket)
            return False
        finished = self._finished.get(key)
        if finished is not None and finished.peer_epoch == peer.epoch:
            raise finished.reason(key)
        self._context.check_ticket(ticket, key, peer.epoch, sends=self.sends)
        if (older := self._attempts.admit(key)) is not None:
            self._end_key(older, StaleMessage(f"{key} replaces {older}", param="attempt"))
        deadline = self._clock.monotonic() + ticket.lifetime_s
        self._live[key] = self._record(key=key, ticket=ticket, peer=peer, deadline=deadline)
        self._deadlines.add(deadline, key)
        return True

    def _start_lease(self, handoff: H) -> None:
        """KV begins to move: `lease_s` remain until the commit."""
        end = self._clock.monotonic() + self._config.lease_s
        handoff.leased |= end < handoff.deadline
        handoff.deadline = min(handoff.deadline, end)
        self._deadlines.add(handoff.deadline, handoff.key)

    def _end_key(self, key: RequestKey, error: BatonError) -> None:
        handoff = self._live.get(key)
        if handoff is not None:
            self._finish(handoff, released=False, error=error.info(), tell=True)

    def _end_all(self, epoch: int, why: str) -> None:
        """End the hand-offs with the peer of this epoch, which is dead or silent."""
        for handoff in [h for h in self._live.values() if h.peer.epoch == epoch]:
            peer = handoff.peer
            error = HandoffFailed(f"worker {peer.worker_id} {why}")
            self._finish(handoff, released=False, error=error.info(), tell=False)

    def _move_to_end(self, handoff: H, *, released: bool, error: ErrorInfo | None) -> bool:
        """End the life cycle of a hand-off, count it and retire it; False when it was over."""
        if handoff.end(released=released, error=error) is Verdict.REPEAT:
            return False
        self._retire(handoff)
        if released:
            self.stats.released += 1
        else:
            self.stats.failures["unknown" if error is None else error.code.value] += 1
        return True

    async def _send_end(self, peer: WorkerRef, end: HandoffEnd) -> CallResult:
        """Tell a peer that a hand-off is over. One that does not answer loses all its others."""
        answer = await self._context.call(peer, methods.END, end)
        if answer.error is not None and not answer.refused:
            self._end_all(peer.epoch, "does not answer")
        return answer
