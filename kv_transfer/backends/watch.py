"""Deadlines for calls that cannot carry one: somebody else ends what they wait for."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watch:
    """One thread for any number of guarded sections. Safe from any thread."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._order: list[tuple[float, int]] = []
        self._guarded: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextmanager
    def guard(self, limit: float, expired: Callable[[], None]) -> Iterator[None]:
        """Call `expired`, in the watch's thread, when the section still runs at `limit`
        (monotonic)."""
        with self._changed:
            number = next(self._numbers)
            self._guarded[number] = expired
            heapq.heappush(self._order, (limit, number))
            if self._order[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._guarded.pop(number, None)

    def close(self) -> None:
        """Watch nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (expired := self._next()) is not None:
            expired()
            del expired  # whose it is may be over, and hold buffers

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                while self._order and self._order[0][1] not in self._guarded:
                    heapq.heappop(self._order)
                if not self._order:
                    self._changed.wait()
                    continue
                limit, number = self._order[0]
                left = limit - time.monotonic()
                if left <= 0:
                    heapq.heappop(self._order)
                    return self._guarded.pop(number)
                self._changed.wait(left)
        return None
