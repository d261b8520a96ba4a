"""Where accepted requests wait for the workers: in fair order, within bounds, and only if it helps.

Workers are given a little more than they can start at once; the rest waits here, where it can be
ordered, bounded and refused. A request goes on when prefill's backlog is short and decode has room,
or when this router has nothing else on its way to a first token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from observability import metrics
from observability.export import MetricSet
from observability.rate import Rate
from protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from protocol.ids import Role
from protocol.timeline import Phase, PlacedSpan, Span
from router.admission.fair_queue import FairQueue, QueueEntry
from router.admission.load_estimate import LoadEstimate, Pace, Peak, pressure
from router.auth.keys import Caller, share
from router.auth.tiers import ServiceTier
from router.config import RouterConfig
from router.workers.worker_set import WorkerSet

#: Output tokens count this often as much as prompt tokens (the paper behind FairQueue has 2).
_OUTPUT_WEIGHT = 2.0
#: How long the pace of finished requests, or of an earlier queue, says something about the next.
_PACE_AGE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """What a request asks of the workers: `tokens` of prompts, by when, for whom.

    `cached` of them prefill will hardly have to compute: its prefix cache has them. arrival and
    deadline are seconds since the Unix epoch.
    """

    caller: Caller
    tier_name: str
    tier: ServiceTier
    priority: int
    arrival: float
    deadline: float
    tokens: int = 0
    cached: int = 0

    @property
    def work(self) -> int:
        """Prompt tokens to compute, one at least."""
        return max(1, self.tokens - self.cached)

    @property
    def flow(self) -> str:
        """Whose share it takes."""
        return f"{self.caller.name}/{self.tier_name}"

    @property
    def weight(self) -> float:
        """Its share against others."""
        return self.caller.weight * self.tier.weight


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request in line; `ready` is resolved when it may go."""

    errand: QueuedRequest
    ready: asyncio.Future[None]


class AdmissionQueue:
    """The waiting requests of one router, on its event loop."""

    def __init__(
        self,
        *,
        members: WorkerSet,
        config: RouterConfig,
        metric_set: MetricSet,
        clock: Callable[[], float],
    ) -> None:
        self.metrics = metric_set
        self.clock = clock
        self._members = members
        self._config = config
        self.num_routers = 1  # what a key may have is shared out over them
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._waiting_of: Counter[str] = Counter()  # tokens to compute, by caller
        self._outstanding = 0  # the same, given to workers, no first token yet
        self._promised = 0  # all prompt tokens of these
        self._peak = Peak()
        self._drained = Rate()  # tokens per second that leave the queue while it is not empty
        self._drained_at = 0.0
        self._pace = Pace(_PACE_AGE_S)
        self._looking = False
        self._patience: asyncio.TimerHandle | None = None  # runs while there is no decode worker
        self._deserted = False  # for longer than that
        members.on_news = self._look_soon

    def finished(self, tokens: int, seconds: float) -> None:
        """A request has ended that took so long for its tokens after the first."""
        self._pace.add(tokens, seconds, self.clock())

    # --- used by Turn -----------------------------------------------------------------------------

    def check(self, errand: QueuedRequest) -> bool:
        """Whether the request may start at once; raises when it should not even wait."""
        now = self._pressure()
        self._check_time(errand, now)
        # Without workers it fails with the right error.
        if not self._queue and (now is None or self._open(now, errand)):
            return True
        self._check_bounds(errand, now)
        return False

    def start(self, errand: QueuedRequest) -> None:
        """A request goes to the workers."""
        self._outstanding += errand.work
        self._promised += errand.tokens

    def started(self, errand: QueuedRequest) -> None:
        """Its first token has come, or it is over."""
        self._outstanding -= errand.work
        self._promised -= errand.tokens
        self.pump()

    def push(self, errand: QueuedRequest, ready: asyncio.Future[None]) -> QueueEntry[_Waiter]:
        """Put a request in line; `ready` is resolved, and its tokens started, when it may go."""
        if not self._queue:
            if self._since_drained() > _PACE_AGE_S:
                self._drained = Rate()  # how another queue drained says nothing about this one
            self._drained_at = self.clock()
        self._waiting_of[errand.caller.name] += errand.work
        entry = self._queue.push(
            _Waiter(errand, ready),
            flow=errand.flow,
            weight=errand.weight,
            cost=errand.work,
            priority=errand.priority,
        )
        self._show()
        return entry

    def left(self, errand: QueuedRequest, entry: QueueEntry[_Waiter]) -> None:
        """It waits no longer, for whatever reason."""
        self._queue.remove(entry)
        self._waiting_of[errand.caller.name] -= errand.work
        self._show()

    def charge(self, errand: QueuedRequest, output_tokens: int) -> None:
        """Count what a request has made towards its caller's share, if others wait: what is had of
        an idle cluster costs nobody anything."""
        if self._queue:
            tokens = _OUTPUT_WEIGHT * output_tokens
            self._queue.charge(errand.flow, tokens, weight=errand.weight)

    def pump(self) -> None:
        """Let go whoever may."""
        while (entry := self._queue.first()) is not None:
            waiter = entry.item
            if not self._may_go(self._pressure(), waiter.errand):
                return
            self._queue.take()
            self._drained.add(entry.cost, self._since_drained())
            self._drained_at = self.clock()
            if not waiter.ready.done():
                self.start(waiter.errand)
                waiter.ready.set_result(None)

    def _may_go(self, now: LoadEstimate | None, errand: QueuedRequest) -> bool:
        """Whether a request in line may go. While there is no decode worker it waits for one, as
        those do that a worker had already; after that time it fails with the right error."""
        if now is not None:
            return self._open(now, errand)
        if self._patience is None:
            wait_s = self._config.resume_wait_s
            self._patience = asyncio.get_running_loop().call_later(wait_s, self._desert)
        return self._deserted

    def _desert(self) -> None:
        self._deserted = True
        self.pump()

    def _look_soon(self) -> None:
        """A worker has reported. Where many do, as often as they step, they are looked at once for
        all that have come together."""
        if self._queue and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        self.pump()

    # --- deciding ---------------------------------------------------------------------------------

    def _pressure(self) -> LoadEstimate | None:
        decodes = self._members.ready(Role.DECODE)
        if not decodes:
            return None
        if self._patience is not None:
            self._patience.cancel()
            self._patience, self._deserted = None, False
        prefills = self._members.ready(Role.PREFILL)
        room_tokens = sum(member.room_tokens for member in decodes)
        now = pressure([member.load for member in prefills], room_tokens=room_tokens)
        if not prefills:
            return now
        best = self._peak.take(now.rate / len(prefills), self.clock())
        return replace(now, rate=best * len(prefills))

    def _open(self, now: LoadEstimate, errand: QueuedRequest) -> bool:
        """Whether a request may go to the workers."""
        if not self._outstanding:
            return True
        if now.backlog_s(self._outstanding) > self._config.dispatch_window_s:
            return False
        # Room is blocks that nobody holds: what is cached of these prompts is in it too.
        return self._promised + errand.tokens <= now.room_tokens

    def _check_time(self, errand: QueuedRequest, now: LoadEstimate | None) -> None:
        """Raise Unavailable when the request cannot have what it was promised."""
        moment = self.clock()
        if moment >= errand.deadline:
            raise DeadlineExceeded("the request's deadline passed", param="timeout")
        if now is None:
            return
        wait_s = self._wait_s(errand, now)
        left_s, reason = errand.deadline - moment, "deadline"
        if errand.tier.ttft_s is not None:
            promised_s = errand.tier.ttft_s - (moment - errand.arrival)
            left_s, reason = min((left_s, reason), (promised_s, "ttft"))
        if wait_s > left_s:
            self._refuse(reason)
            raise Unavailable(
                f"cannot be served in time: about {wait_s:.1f} s of work wait before it, "
                f"{max(0.0, left_s):.1f} s are left",
                retry_after_s=self._retry_s(wait_s - left_s),
            )
        if errand.tier.tpot_s is None:
            return
        tpot_s, counts_s = self._pace.take(moment)
        if tpot_s > errand.tier.tpot_s:
            self._refuse("tpot")
            raise Unavailable(
                f"cannot be served in time: a token takes {tpot_s:.3f} s now, the service tier "
                f"{errand.tier_name!r} promises {errand.tier.tpot_s:g} s",
                retry_after_s=self._retry_s(counts_s),
            )

    def _check_bounds(self, errand: QueuedRequest, now: LoadEstimate | None) -> None:
        """Raise Overloaded when too much waits already."""
        config, waiting = self._config, self._waiting_of[errand.caller.name]
        most = share(errand.caller.max_queued_tokens, self.num_routers)
        if most is not None and waiting and waiting + errand.work > most:
            reason = "key_queue_full"
            text = f"the API key {errand.caller.name!r} has {waiting} of {most} tokens waiting"
        elif len(self._queue) >= config.max_queued_requests:
            reason, text = "queue_full", f"{len(self._queue)} requests are waiting"
        elif self._queue.tokens + errand.work > config.max_queued_tokens:
            reason, text = "queue_full", f"{self._queue.tokens} prompt tokens are waiting"
        else:
            return
        self._refuse(reason)
        wait_s = 0.0 if now is None else self._wait_s(errand, now)
        raise Overloaded(text, retry_after_s=self._retry_s(wait_s))

    def _wait_s(self, errand: QueuedRequest, now: LoadEstimate) -> float:
        """Estimated seconds until prefill would begin with a request that came now."""
        wait_s = now.backlog_s(self._outstanding)
        if self._queue:
            # Long outputs let go of their room in bursts: what passes between two is no standstill.
            rate = self._drained.per_second(self._since_drained()) or now.rate
            ahead = self._queue.ahead(errand.flow, weight=errand.weight)
            wait_s += ahead / rate if rate else 0.0
        return wait_s

    def _since_drained(self) -> float:
        return max(0.0, self.clock() - self._drained_at)

    def _retry_s(self, estimate_s: float) -> float:
        return max(self._config.retry_after_s, estimate_s)

    def _refuse(self, reason: str) -> None:
        self.metrics.count(metrics.REFUSALS, reason=reason)

    def _show(self) -> None:
        self.metrics.set(metrics.QUEUED_REQUESTS, len(self._queue))
        self.metrics.set(metrics.QUEUED_TOKENS, self._queue.tokens)


class AdmissionTicket:
    """One request's turn: `wait` for it, say when it has `started`, and `end` it. Nothing is
    counted before that."""

    def __init__(self, room: AdmissionQueue, errand: QueuedRequest) -> None:
        self._room = room
        self._errand = errand
        self._under_way = False  # to its first token
        self._waited: tuple[float, float] | None = None
        self.arrival = errand.arrival
        self.tier_name = errand.tier_name

    async def wait(self) -> None:
        """Return when the request may go to the workers.

        Raises Overloaded, Unavailable or DeadlineExceeded instead of waiting in vain, and leaves
        nothing counted then.
        """
        room = self._room
        if room.check(self._errand):
            room.start(self._errand)
        else:
            start = room.clock()
            await self._in_line()
            self._waited = (start, room.clock())
        self._under_way = True

    def started(self) -> None:
        """The first token has come. Idempotent."""
        if self._under_way:
            self._under_way = False
            self._room.started(self._errand)

    def end(self, output_tokens: int) -> None:
        """It is over, with so many tokens made."""
        self.started()
        self._room.charge(self._errand, output_tokens)

    def spans(self, place: str) -> list[PlacedSpan]:
        """The wait, if there was one."""
        if self._waited is None:
            return []
        start, end = self._waited
        span = Span(phase=Phase.QUEUE, start=start, end=end, place=place)
        return [PlacedSpan(span=span, choice=0, attempt=0)]

    async def _in_line(self) -> None:
        errand, room = self._errand, self._room
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = room.push(errand, ready)
        try:
            async with asyncio.timeout(errand.deadline - room.clock()):
                await ready
        except BaseException as error:
            if ready.done() and not ready.cancelled():
                room.started(errand)  # it was let go and will not go
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    "the request's deadline passed while it waited", param="timeout"
                ) from None
            raise
        finally:
            room.left(errand, entry)
