"""Keeps requests from a worker that keeps failing them. Pure.

A worker that fails at once has few sequences and would draw the traffic by that. After a few
failures its breaker opens: no requests for a while, then one at a time until one succeeds.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from protocol.ids import RequestKey

#: Failures less successes that open the breaker.
_MAX_FAILURES = 3
#: A failure counts for so long.
_MEMORY_S = 30.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class BreakerState(StrEnum):
    """What a worker may be given."""

    CLOSED = "closed"  # requests
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one request at a time


class _BreakerEvent(Enum):
    FAILED = auto()  # too often, or the probe
    PAUSED = auto()  # for long enough
    SUCCEEDED = auto()  # the probe


_NEXT = {
    (BreakerState.CLOSED, _BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.OPEN, _BreakerEvent.PAUSED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.SUCCEEDED): BreakerState.CLOSED,
}


class CircuitBreaker:
    """The breaker of one worker. `now` is in seconds on any steady clock."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._last_failure = self._open_until = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._probe: RequestKey | None = None

    def allows(self, now: float) -> bool:
        """Whether the worker may be given a request."""
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self.state = _NEXT[self.state, _BreakerEvent.PAUSED]
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.HALF_OPEN and self._probe is None
        )

    def started(self, key: RequestKey) -> None:
        """An attempt goes to the worker."""
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = key

    def ended(self, key: RequestKey) -> None:
        """It is over, with or without an outcome."""
        if self._probe == key:
            self._probe = None

    def succeeded(self, key: RequestKey) -> None:
        """The worker did its part of an attempt."""
        self._failures = max(0, self._failures - 1)
        if self.state is BreakerState.HALF_OPEN and key == self._probe:
            self.state = _NEXT[self.state, _BreakerEvent.SUCCEEDED]
            self._failures, self._pause_s = 0, _FIRST_PAUSE_S

    def failed(self, key: RequestKey, now: float) -> None:
        """The worker failed an attempt, or refused it though it is not full."""
        recent = self._failures if now <= self._last_failure + _MEMORY_S else 0
        self._failures, self._last_failure = recent + 1, now
        if self.state is BreakerState.HALF_OPEN and key == self._probe:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        elif self.state is not BreakerState.CLOSED or self._failures < _MAX_FAILURES:
            return  # an attempt from before the pause does not prolong it
        self.state = _NEXT[self.state, _BreakerEvent.FAILED]
        self._open_until = now + self._pause_s
