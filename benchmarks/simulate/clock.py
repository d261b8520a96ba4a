"""A virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at that time, or now if it has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call so many seconds from now."""
        self.at(self.now + seconds, call, *arguments)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
