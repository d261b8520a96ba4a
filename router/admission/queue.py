"""Where accepted requests wait for the workers: in fair order, within bounds, and only if it helps.

Workers are given a little more than they can start at once; the rest waits here, where it can be
ordered, bounded and refused. A request goes on when a prefill worker would begin with it soon and
decode workers have blocks for it, or when no other request of this router waits for a first token.

Outstanding work has one account: what the workers report, corrected by their reservations
(router.workers.bookkeeping), and the requests that were let go and have no workers yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from random import sample

from observability import metrics
from observability.clock import Peak
from observability.export import MetricSet
from protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from protocol.ids import Role
from protocol.loads import RouterLoad
from protocol.timeline import Phase, PlacedSpan, Span
from router.admission.fair_queue import FairQueue, QueueEntry
from router.admission.load_estimate import DrainRate, LoadEstimate, Pace, QueuedRequest
from router.auth.keys import Caller, share
from router.config import RouterConfig
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

#: Output tokens count this often as much as prompt tokens (the paper behind FairQueue has 2).
_OUTPUT_WEIGHT = 2.0
#: How long the pace of finished requests, or of an earlier queue, says something about the next.
_PACE_AGE_S = 10.0
#: A request that has waited so long for blocks goes to a decode worker without, one at a time:
#: decode reserves what becomes free for the oldest that waits there.
_BLOCK_WAIT_S = 5.0
#: Of more workers than this only so many are looked at.
_MAX_LOOKED_AT = 48


class TicketState(StrEnum):
    """Where a request is on its way to the workers."""

    NEW = "new"
    WAITING = "waiting"
    RELEASED = "released"  # let go, some of its sequences have no workers yet
    SUBMITTED = "submitted"  # all sequences are reserved on their workers
    STARTED = "started"  # the first token has come
    ENDED = "ended"


_NEXT = {
    TicketState.NEW: {TicketState.WAITING, TicketState.RELEASED, TicketState.ENDED},
    TicketState.WAITING: {TicketState.RELEASED, TicketState.ENDED},
    TicketState.RELEASED: {TicketState.SUBMITTED, TicketState.STARTED, TicketState.ENDED},
    TicketState.SUBMITTED: {TicketState.STARTED, TicketState.ENDED},
    TicketState.STARTED: {TicketState.ENDED},
    TicketState.ENDED: set(),
}


class AdmissionQueue:
    """The waiting requests of one router, on its event loop."""

    def __init__(
        self,
        *,
        workers: WorkerSet,
        config: RouterConfig,
        metric_set: MetricSet,
        clock: Callable[[], float],
    ) -> None:
        self.metrics = metric_set
        self.clock = clock
        self.num_routers = 1  # the limits of a key are shared out over them
        self._workers = workers
        self._config = config
        self._queue: FairQueue[AdmissionTicket] = FairQueue()
        self._tickets: dict[TicketState, set[AdmissionTicket]] = {
            state: set()
            for state in (TicketState.WAITING, TicketState.RELEASED, TicketState.SUBMITTED)
        }
        self._peak = Peak()
        self._drain = DrainRate(_PACE_AGE_S)
        self._pace = Pace(_PACE_AGE_S)
        self._pump_scheduled = False
        self._decode_timer: asyncio.TimerHandle | None = None  # runs while decode is missing
        self._decode_missed = False  # for longer than that
        self._arrived_tokens = self._refused_for_pace = 0
        workers.on_report = self._pump_soon

    def load(self) -> RouterLoad:
        """What waits here and what has come."""
        waiting = self._tickets[TicketState.WAITING]
        return RouterLoad(
            waiting_tokens=sum(t.request.work for t in waiting if not t.lacks_blocks),
            blocked_tokens=sum(t.request.tokens for t in waiting if t.lacks_blocks),
            arrived_tokens=self._arrived_tokens,
            refused_for_pace=self._refused_for_pace,
        )

    def finished(self, tokens: int, seconds: float) -> None:
        """A request has ended whose tokens after the first took so long."""
        self._pace.add(tokens, seconds, self.clock())

    # --- used by AdmissionTicket ------------------------------------------------------------------

    def enter(self, ticket: AdmissionTicket) -> None:
        """Release a request at once, or queue it; raises when waiting would not help."""
        request, load = ticket.request, self._load()
        self._arrived_tokens += request.work
        self._check_time(request, load)
        if len(self._queue):
            self.pump()
        # Without workers it fails with the right error.
        if (load is None and not len(self._queue)) or (load and self._may_go(load, ticket)):
            if len(self._queue):
                self._queue.charge(request.flow, request.work, weight=request.weight)
            self.move(ticket, TicketState.RELEASED)
            return
        self._check_bounds(request, load)
        ticket.entry = self._queue.push(
            ticket,
            flow=request.flow,
            weight=request.weight,
            cost=request.work,
            num_tokens=request.tokens,
            priority=request.priority,
        )
        self.move(ticket, TicketState.WAITING)

    def move(self, ticket: AdmissionTicket, state: TicketState) -> None:
        """Take a ticket to its next state: the only place that changes what is outstanding."""
        before = ticket.state
        assert state in _NEXT[before], (before, state)
        ticket.state = state
        if before in self._tickets:
            self._tickets[before].discard(ticket)
        if state in self._tickets:
            self._tickets[state].add(ticket)
        if before is TicketState.WAITING and ticket.entry is not None:
            self._queue.remove(ticket.entry)
            if not len(self._queue):
                self._drain.pause()
        if TicketState.WAITING in (before, state):
            self.metrics.set(metrics.QUEUED_REQUESTS, len(self._queue))
            self.metrics.set(metrics.QUEUED_TOKENS, self._queue.tokens)
        elif before in (TicketState.RELEASED, TicketState.SUBMITTED):
            self.pump()

    def charge(self, request: QueuedRequest, output_tokens: int) -> None:
        """Count a request's output towards its caller's share; usage is charged only while others
        wait."""
        if len(self._queue):
            tokens = _OUTPUT_WEIGHT * output_tokens
            self._queue.charge(request.flow, tokens, weight=request.weight)

    def pump(self) -> None:
        while len(self._queue):
            entry = self._queue.next(partial(self._may_go, self._load()))
            if entry is None:
                return
            ticket = entry.item
            self._queue.take(entry)
            if ticket.released.done():  # cancelled, and about to leave
                continue
            self._drain.add(entry.num_tokens, self.clock())
            self.move(ticket, TicketState.RELEASED)
            ticket.released.set_result(None)

    def _pump_soon(self) -> None:
        """A worker has reported. Reports that come together are looked at once."""
        if len(self._queue) and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump_scheduled_now)

    def _pump_scheduled_now(self) -> None:
        self._pump_scheduled = False
        self.pump()

    # --- deciding ---------------------------------------------------------------------------------

    def _load(self) -> LoadEstimate | None:
        decodes = self._workers.ready(Role.DECODE)
        if not decodes:
            return None
        if self._decode_timer is not None:
            self._decode_timer.cancel()
            self._decode_timer, self._decode_missed = None, False
        prefills = self._workers.ready(Role.PREFILL)
        num_decodes, num_prefills = len(decodes), len(prefills)
        decodes, prefills = _some(decodes), _some(prefills)
        rates = [rate for w in prefills if (rate := w.load.tokens_per_second) > 0]
        rate = sum(rates) / len(rates) if rates else 0.0
        return LoadEstimate(
            backlogs=[worker.backlog_tokens for worker in prefills],
            rate=self._peak.take(rate, self.clock()) if prefills else 0.0,
            free_tokens=[worker.free_tokens for worker in decodes],
            num_prefills=num_prefills,
            num_decodes=num_decodes,
        )

    def _may_go(self, load: LoadEstimate | None, ticket: AdmissionTicket) -> bool:
        if load is None:
            return self._decode_is_missing()
        unplaced = [other.request for other in self._tickets[TicketState.RELEASED]]
        if not unplaced and not self._tickets[TicketState.SUBMITTED]:
            return True
        if load.wait_s(ticket.request.work, unplaced) > self._config.dispatch_window_s:
            return False
        if load.has_room(ticket.request, unplaced):
            return True
        if ticket.state is not TicketState.WAITING:
            return False
        return self._lacks_blocks(ticket)

    def _lacks_blocks(self, ticket: AdmissionTicket) -> bool:
        """Whether a request that decode has no blocks for has waited long enough to go all the
        same."""
        now = self.clock()
        ticket.lacks_blocks = True
        self._drain.begin(now)
        if now - ticket.queued_at < _BLOCK_WAIT_S:
            return False
        under_way = self._tickets[TicketState.RELEASED] | self._tickets[TicketState.SUBMITTED]
        if any(other.goes_without_blocks for other in under_way):
            return False
        ticket.goes_without_blocks = True
        return True

    def _decode_is_missing(self) -> bool:
        """While there is no decode worker, requests wait for one as long as resumed ones do; then
        they fail with the right error."""
        if self._decode_timer is None:
            wait_s = self._config.resume_wait_s
            self._decode_timer = asyncio.get_running_loop().call_later(wait_s, self._miss_decode)
        return self._decode_missed

    def _miss_decode(self) -> None:
        self._decode_missed = True
        self.pump()

    def _check_time(self, request: QueuedRequest, load: LoadEstimate | None) -> None:
        """Raise Unavailable when the request cannot have what its tier promises."""
        now = self.clock()
        if now >= request.deadline:
            raise DeadlineExceeded("the request's deadline passed", param="timeout")
        if load is None:
            return
        wait_s = self._wait_s(request, load)
        left_s, reason = request.deadline - now, "deadline"
        if request.tier.ttft_s is not None:
            promised_s = request.tier.ttft_s - (now - request.arrival)
            left_s, reason = min((left_s, reason), (promised_s, "ttft"))
        if wait_s > left_s:
            self._count_refusal(reason)
            raise Unavailable(
                f"cannot be served in time: about {wait_s:.1f} s of work wait before it, "
                f"{max(0.0, left_s):.1f} s are left",
                retry_after_s=self._retry_s(wait_s - left_s),
            )
        self._check_pace(request, now)

    def _check_pace(self, request: QueuedRequest, now: float) -> None:
        """Raise Unavailable when tokens would come slower than the request's tier promises."""
        tier = request.tier
        tpot_s, counts_s = self._pace.take(now)
        if tier.tpot_s is not None and tpot_s > tier.tpot_s:
            reason, text, promised_s = "tpot", f"a token takes {tpot_s:.3f} s", tier.tpot_s
        elif tier.gap_s is not None and (step_s := self._decode_step_s()) > tier.gap_s:
            reason, text, promised_s = "gap", f"a decode step takes {step_s:.4f} s", tier.gap_s
            counts_s = 0.0
        else:
            return
        self._refused_for_pace += 1
        self._count_refusal(reason)
        raise Unavailable(
            f"cannot be served in time: {text} now, the service tier {request.tier_name!r} "
            f"promises {promised_s:g} s",
            retry_after_s=self._retry_s(counts_s),
        )

    def _decode_step_s(self) -> float:
        """The shortest step without prompts of any decode worker; 0 while one has measured none."""
        return min(worker.load.decode_step_s for worker in self._workers.ready(Role.DECODE))

    def _check_bounds(self, request: QueuedRequest, load: LoadEstimate | None) -> None:
        """Raise Overloaded when too much waits already."""
        config = self._config
        limit = share(request.caller.max_queued_tokens, self.num_routers)
        waiting = 0 if limit is None else self._waiting_tokens(request.caller)
        if limit is not None and waiting and waiting + request.work > limit:
            reason = "key_queue_full"
            text = f"the API key {request.caller.name!r} has {waiting} of {limit} tokens waiting"
        elif len(self._queue) >= config.max_queued_requests:
            reason, text = "queue_full", f"{len(self._queue)} requests are waiting"
        elif self._queue.tokens + request.work > config.max_queued_tokens:
            reason, text = "queue_full", f"{self._queue.tokens} prompt tokens are waiting"
        else:
            return
        self._count_refusal(reason)
        wait_s = 0.0 if load is None else self._wait_s(request, load)
        raise Overloaded(text, retry_after_s=self._retry_s(wait_s))

    def _waiting_tokens(self, caller: Caller) -> int:
        waiting = (ticket.request for ticket in self._tickets[TicketState.WAITING])
        return sum(request.work for request in waiting if request.caller.name == caller.name)

    def _wait_s(self, request: QueuedRequest, load: LoadEstimate) -> float:
        """Estimated seconds until prefill would begin with a request that came now."""
        unplaced = [other.request for other in self._tickets[TicketState.RELEASED]]
        wait_s, flow, weight = load.wait_s(request.work, unplaced), request.flow, request.weight
        if len(self._queue):
            ahead, stored = self._queue.ahead(flow, weight=weight, cost=request.work)
            queued_s = ahead / load.pool_rate if load.rate else 0.0
            if not load.has_room(request, unplaced):
                queued_s = max(queued_s, self._drain.wait_s(stored, self.clock()))
            wait_s += queued_s
        return wait_s

    def _retry_s(self, estimate_s: float) -> float:
        return max(self._config.retry_after_s, estimate_s)

    def _count_refusal(self, reason: str) -> None:
        self.metrics.count(metrics.REFUSALS, reason=reason)


def _some(workers: list[WorkerClient]) -> list[WorkerClient]:
    """All of a few workers, a random sample of many: each report is followed by a look."""
    return workers if len(workers) <= _MAX_LOOKED_AT else sample(workers, _MAX_LOOKED_AT)


class AdmissionTicket:
    """One request's way to the workers: `wait`, then `submitted` for each sequence, `started` with
    the first token, and `end`. Nothing is counted before `wait`."""

    def __init__(self, queue: AdmissionQueue, request: QueuedRequest) -> None:
        self.request = request
        self.state = TicketState.NEW
        self.entry: QueueEntry[AdmissionTicket] | None = None
        self.queued_at = 0.0
        self.lacks_blocks = False  # it has waited for blocks of decode
        self.goes_without_blocks = False
        self.released: asyncio.Future[None]
        self._queue = queue
        self._num_submitted = 0
        self._released_at = 0.0

    async def wait(self) -> None:
        """Return when the request may go to the workers.

        Raises Overloaded, Unavailable or DeadlineExceeded when waiting would not help; nothing is
        counted then.
        """
        queue = self._queue
        self.queued_at = queue.clock()
        self.released = asyncio.get_running_loop().create_future()
        queue.enter(self)
        if self.state is not TicketState.WAITING:
            return
        try:
            async with asyncio.timeout(self.request.deadline - self.queued_at):
                await self.released
        except BaseException as error:
            queue.move(self, TicketState.ENDED)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    "the request's deadline passed while it waited", param="timeout"
                ) from None
            raise
        self._released_at = queue.clock()

    def submitted(self) -> None:
        """One more of its sequences is reserved on its workers."""
        self._num_submitted += 1
        all_submitted = self._num_submitted >= self.request.num_sequences
        if all_submitted and self.state is TicketState.RELEASED:
            self._queue.move(self, TicketState.SUBMITTED)

    def started(self) -> None:
        """The first token has come. Idempotent."""
        if self.state in (TicketState.RELEASED, TicketState.SUBMITTED):
            self._queue.move(self, TicketState.STARTED)

    def end(self, output_tokens: int) -> None:
        """The request is over, with so many tokens made. Idempotent."""
        if self.state is not TicketState.ENDED:
            self._queue.move(self, TicketState.ENDED)
            self._queue.charge(self.request, output_tokens)

    def spans(self, place: str) -> list[PlacedSpan]:
        """The wait, if there was one."""
        if not self._released_at:
            return []
        span = Span(phase=Phase.QUEUE, start=self.queued_at, end=self._released_at, place=place)
        return [PlacedSpan(span=span, choice=0, attempt=0)]
