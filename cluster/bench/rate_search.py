"""The highest rate at which a server keeps its promises: doubling, then halving. Pure."""

from __future__ import annotations

import math

#: Doublings and halvings of one search.
_MAX_STEPS = 16


class RateSearch:
    """Ask `next_rate`, measure there, `add` the share of requests that kept every promise.

    start: the first rate. wanted: the share that is enough. precision: the search ends when the
    rates that are enough and not enough differ by less than this factor.
    """

    def __init__(self, start: float, *, wanted: float = 0.9, precision: float = 1.1) -> None:
        if start <= 0 or not 0 < wanted <= 1 or precision <= 1:
            raise ValueError("needs start > 0, 0 < wanted <= 1 and precision > 1")
        self.best = 0.0
        self._start = start
        self._wanted = wanted
        self._precision = precision
        self._too_high = math.inf
        self._steps = 0

    def next_rate(self) -> float | None:
        """The rate to measure next; None when the search is over."""
        if self._steps == _MAX_STEPS or self._too_high < self.best * self._precision:
            return None
        if self._too_high == math.inf:
            return self.best * 2 or self._start
        return math.sqrt(self.best * self._too_high) if self.best else self._too_high / 2

    def add(self, rate: float, kept: float) -> None:
        """Take in what was measured at a rate."""
        self._steps += 1
        if kept >= self._wanted:
            self.best = max(self.best, rate)
        else:
            self._too_high = min(self._too_high, rate)
