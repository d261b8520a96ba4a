"""How much work is ahead of a new request, from the workers' own reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """Both pools as one request sees them.

    backlog_tokens: prompt tokens that prefill workers have accepted and not computed. rate: prompt
    tokens per second of the whole prefill pool, 0 before it is measured. room_tokens: what the KV
    pools of decode have room for.
    """

    backlog_tokens: int
    rate: float
    room_tokens: int

    def backlog_s(self, outstanding_tokens: int) -> float:
        """Seconds until prefill would reach a new prompt. `outstanding_tokens` are those that this
        router alone has sent; the reports may not show them yet."""
        tokens = max(self.backlog_tokens, outstanding_tokens)
        return tokens / self.rate if self.rate else 0.0


def pressure(prefills: Sequence[WorkerLoad], *, room_tokens: int) -> LoadEstimate:
    """The pressure on these prefill workers, and on decode workers with so much room."""
    rates = [load.tokens_per_second for load in prefills if load.tokens_per_second > 0]
    return LoadEstimate(
        backlog_tokens=sum(load.waiting_tokens for load in prefills),
        rate=len(prefills) * sum(rates) / len(rates) if rates else 0.0,
        room_tokens=room_tokens,
    )


class Peak:
    """The highest of the latest values. A worker that gets short prompts, one at a time, reports a
    low rate; what it can do under load is what it did when it was last busy. One that has just come
    reports none (0), and is taken to be like those before it, however long ago that was."""

    def __init__(self, half_life_s: float = 60.0) -> None:
        self._half_life_s = half_life_s
        self._value = 0.0
        self._latest = 0.0
        self._at = 0.0

    def take(self, value: float, now: float) -> float:
        """Take a value in; the highest, older ones having faded."""
        self._latest = value or self._latest
        self._value *= 0.5 ** (max(0.0, now - self._at) / self._half_life_s)
        self._value = max(self._value, self._latest)
        self._at = now
        return self._value


class Pace:
    """Seconds a token of the requests that ended in the last `age_s` seconds, by all their tokens
    together: a short one that happened to be slow says little."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._ended: deque[tuple[float, int, float]] = deque()  # when, tokens, seconds
        self._tokens, self._seconds = 0, 0.0  # of all of them

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """A request has ended whose last `tokens` took so long."""
        self._forget(now)
        self._ended.append((now, tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds

    def take(self, now: float) -> tuple[float, float]:
        """The pace, 0 when no request has ended lately, and for how long the latest counts."""
        self._forget(now)
        if not self._ended:
            return 0.0, 0.0
        return self._seconds / self._tokens, self._ended[-1][0] + self._age_s - now

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now - self._age_s:
            _, tokens, seconds = self._ended.popleft()
            self._tokens -= tokens
            self._seconds -= seconds
        if not self._ended:
            self._seconds = 0.0  # whatever rounding has left
