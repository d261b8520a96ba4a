"""A smoothed rate of tokens per second of busy time."""

from __future__ import annotations

import math


class Rate:
    """Exponentially weighted over busy time with the time constant `window_s`: idle time does not
    change it, so it measures the speed of a working worker."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of `seconds` ran `tokens` tokens."""
        keep = math.exp(-seconds / self._window_s)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    def per_second(self, since_s: float = 0.0) -> float:
        """Tokens per second of busy time, including `since_s` after the last step; 0 before the
        first step."""
        seconds = self._seconds + since_s
        return self._tokens / seconds if seconds > 0 else 0.0
