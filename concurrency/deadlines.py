"""When the next hand-off is due, and one timer for all of them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from protocol.ids import RequestKey

#: Entries that are kept without a look at whether they are of use.
_LEAST = 64


class Deadlines:
    """Calls `ring` on the event loop when the earliest deadline has passed. No polling.

    Entries are not taken back: whoever is rung looks at what is really due. Those of keys that are
    not `alive` any more are dropped before they are most of what is kept. Deadlines are monotonic
    seconds of `now`, which need not be the loop's clock.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        ring: Callable[[], None],
        alive: Callable[[RequestKey], bool],
    ) -> None:
        self._now = now
        self._ring = ring
        self._alive = alive
        self._limit = _LEAST
        self._heap: list[tuple[float, str, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    def add(self, deadline: float, key: RequestKey) -> None:
        """Ring at `deadline` for `key`."""
        heapq.heappush(self._heap, (deadline, key.request_id, key.attempt))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._alive(RequestKey(*entry[1:]))]
            heapq.heapify(self._heap)
            self._limit = max(_LEAST, 2 * len(self._heap))
        self._arm()

    def due(self, now: float) -> list[RequestKey]:
        """Take out every key whose deadline has come."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, attempt = heapq.heappop(self._heap)
            keys.append(RequestKey(request_id, attempt))
        return keys

    def close(self) -> None:
        """Ring no more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if not self._heap:
            return
        first = self._heap[0][0]
        if self._timer is not None:
            if self._armed_for <= first:
                return
            self._timer.cancel()
        self._armed_for = first
        delay = max(0.0, first - self._now())
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        try:
            self._ring()
        finally:
            self._arm()
