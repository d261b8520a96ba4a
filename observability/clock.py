"""Wall time without jumps, and rates of tokens over time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Wall time at this call plus monotonic time since, in seconds since the Unix epoch: adjusting
    the system's clock cannot move a deadline. Not comparable across processes."""
    # Where available, the clock that includes the time a machine sleeps.
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    read = time.clock_gettime
    began = time.time() - read(clock)
    return lambda: began + read(clock)


#: Time constant of a Rate.
_WINDOW_S = 5.0


class Rate:
    """Tokens per second, exponentially weighted over busy time: idle time does not change it, so it
    measures the speed of a working worker."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of `seconds` ran `tokens` tokens."""
        keep = math.exp(-seconds / _WINDOW_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    def per_second(self, since_s: float = 0.0) -> float:
        """Tokens per second of busy time, including `since_s` after the last step; 0 before the
        first step."""
        seconds = self._seconds + since_s
        return self._tokens / seconds if seconds > 0 else 0.0


class Peak:
    """The highest of the latest values, older ones fading. A worker that gets short prompts, one at
    a time, reports a low rate; under load it does what it did when it was last busy. A new worker
    reports 0 and is taken to be like those before it, however long ago that was."""

    def __init__(self, half_life_s: float = 60.0) -> None:
        self._half_life_s = half_life_s
        self._value = 0.0
        self._latest = 0.0
        self._at = 0.0

    def take(self, value: float, now: float) -> float:
        """Add a value. Returns the peak."""
        self._latest = value or self._latest
        self._value *= 0.5 ** (max(0.0, now - self._at) / self._half_life_s)
        self._value = max(self._value, self._latest)
        self._at = now
        return self._value
