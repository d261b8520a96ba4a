"""How long a new request would wait, from the workers' reports and what was let go lately. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from observability.clock import Rate
from protocol.messages import size_class
from router.auth.keys import Caller, ServiceTier

#: How far ahead the pace of a queue tells, as a multiple of the time that it has been seen.
_FORESIGHT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """What a request asks of the workers, by when, for whom.

    tokens: of all prompts; largest: of the longest one; work: those to compute, at least 1.
    arrival and deadline are seconds since the Unix epoch.
    """

    caller: Caller
    tier_name: str
    tier: ServiceTier
    priority: int
    arrival: float
    deadline: float
    tokens: int = 0
    largest: int = 0
    work: int = 1
    num_sequences: int = 1

    @property
    def flow(self) -> str:
        return f"{self.caller.name}/{self.tier_name}"

    @property
    def weight(self) -> float:
        return self.caller.weight * self.tier.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """Both pools at one moment.

    backlogs: for each prefill worker, the tokens that it computes before a prompt of a size class.
    rate: prompt tokens per second of one prefill worker, 0 before it is measured. free_tokens: what
    the KV pool of each decode worker has blocks for. Of large pools both are those of a sample;
    num_prefills and num_decodes count all workers. `unplaced` in the methods are the requests
    that were let go and have no workers yet, so that no worker's figures include them.
    """

    backlogs: Sequence[Callable[[int], int]]
    rate: float
    free_tokens: Sequence[int]
    num_prefills: int
    num_decodes: int

    @property
    def pool_rate(self) -> float:
        return self.rate * self.num_prefills

    @property
    def pool_free_tokens(self) -> float:
        return sum(self.free_tokens) * self.num_decodes / len(self.free_tokens)

    def wait_s(self, work: int, unplaced: Iterable[QueuedRequest]) -> float:
        """Seconds until some prefill worker would begin with a prompt. Larger ones do not count:
        where not all can be in time, those give way."""
        if not self.rate:
            return 0.0
        size = size_class(work)
        backlog = min(tokens(size) for tokens in self.backlogs)
        unplaced_tokens = sum(other.work for other in unplaced if size_class(other.work) <= size)
        return backlog / self.rate + unplaced_tokens / self.pool_rate

    def has_room(self, request: QueuedRequest, unplaced: Iterable[QueuedRequest]) -> bool:
        """Whether decode workers have blocks for all of a request's prompts now."""
        tokens = request.tokens + sum(other.tokens for other in unplaced)
        return request.largest <= max(self.free_tokens) and tokens <= self.pool_free_tokens


class DrainRate:
    """How long tokens wait for room on decode, by all that left the queue since a request was found
    to lack room: by their room, not by their work, which may be one token of a cached prompt. Room
    comes free in bursts, so the time since the last one counts only once there is a rate."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._rate = Rate()
        self._running = False
        self._watched_s = self._last = 0.0

    def begin(self, now: float) -> None:
        """A request lacks room. How an old queue drained says nothing about this one."""
        if self._running:
            return
        if now - self._last > self._max_age_s:
            self._rate, self._watched_s = Rate(), 0.0
        self._running, self._last = True, now

    def pause(self) -> None:
        """Nothing waits any more."""
        self._running = False

    def add(self, tokens: int, now: float) -> None:
        """A request was let go that needs room for so many tokens."""
        if self._running:
            seconds = max(0.0, now - self._last)
            self._rate.add(tokens, seconds)
            self._watched_s += seconds
            self._last = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until so many tokens have gone, 0 when unknown. A few small requests say little
        about many: no more than ten times as long as the queue has been watched."""
        since_s = max(0.0, now - self._last)
        if not self._running:
            if since_s > self._max_age_s:
                return 0.0
            since_s = 0.0
        rate = self._rate.per_second(since_s)
        return min(tokens / rate, _FORESIGHT * (self._watched_s + since_s)) if rate else 0.0


class Pace:
    """Seconds per token of the requests that ended in the last `max_age_s` seconds, by all their
    tokens together, so that one slow short request says little."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._ended: deque[tuple[float, int, float]] = deque()  # when, tokens, seconds
        self._tokens, self._seconds = 0, 0.0  # of all of them

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """A request has ended whose last `tokens` took so long."""
        self._expire(now)
        self._ended.append((now, tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds

    def take(self, now: float) -> tuple[float, float]:
        """The pace, 0 when no request has ended lately, and for how long the latest counts."""
        self._expire(now)
        if not self._ended:
            return 0.0, 0.0
        return self._seconds / self._tokens, self._ended[-1][0] + self._max_age_s - now

    def _expire(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now - self._max_age_s:
            _, tokens, seconds = self._ended.popleft()
            self._tokens -= tokens
            self._seconds -= seconds
        if not self._ended:
            self._seconds = 0.0  # rounding errors
