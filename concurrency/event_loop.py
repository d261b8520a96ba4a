"""Tasks and timers of an event loop: background work, deadlines of requests, silence of a peer."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from observability.logging import get_logger
from protocol.errors import BatonError
from protocol.ids import RequestKey

log = get_logger(__name__)

#: Up to this size the heap is not searched for dead entries.
_MIN_HEAP = 64
#: Ticks of a silence limit.
_TICKS = 4


def _log_failure(error: BaseException) -> None:
    if isinstance(error, BatonError):
        log.warning("background task failed", extra={"error": error.message})
    else:
        log.error("background task failed", exc_info=error)


class Tasks:
    """Background tasks, kept until they end; `on_failure` gets what a task raises."""

    def __init__(self, on_failure: Callable[[BaseException], None] = _log_failure) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` on the current loop; tasks start in the order of these calls."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def done(self) -> None:
        """Wait until nothing is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Wait at most `grace_s` seconds for running tasks, then cancel them and wait for their
        end."""
        if self._tasks and grace_s:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


class Deadlines:
    """Calls `on_due` on the event loop when the earliest deadline has passed. No polling.

    Entries are never removed by key: `on_due` re-checks what is due. Once the heap has doubled,
    entries of keys that are not `alive` are dropped. Deadlines are monotonic seconds of `now`,
    which need not be the loop's clock.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        on_due: Callable[[], None],
        alive: Callable[[RequestKey], bool],
    ) -> None:
        self._now = now
        self._on_due = on_due
        self._alive = alive
        self._limit = _MIN_HEAP
        self._heap: list[tuple[float, str, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    def add(self, deadline: float, key: RequestKey) -> None:
        heapq.heappush(self._heap, (deadline, key.request_id, key.attempt))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._alive(RequestKey(*entry[1:]))]
            heapq.heapify(self._heap)
            self._limit = max(_MIN_HEAP, 2 * len(self._heap))
        self._arm()

    def due(self, now: float) -> list[RequestKey]:
        """Remove and return every key whose deadline has come."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, attempt = heapq.heappop(self._heap)
            keys.append(RequestKey(request_id, attempt))
        return keys

    def close(self) -> None:
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
            self._on_due()
        finally:
            self._arm()


@asynccontextmanager
async def silence_limit(
    limit_s: float, *, on_half: Callable[[], object] = lambda: None
) -> AsyncIterator[Callable[[], None]]:
    """End the block with TimeoutError when the peer sends nothing for about `limit_s` seconds, and
    call `on_half` after half of them; yields the function to call whenever something arrives. A
    stall of this process triggers neither.

    The limit is counted in ticks, and the next tick is scheduled only when the last has run. A
    stall of this event loop, however long, thus counts as one tick, and what arrived meanwhile is
    processed before the next. A short extra tick covers a stall that ends the last one.
    """
    loop, quiet, tick_s = asyncio.get_running_loop(), 0, limit_s / _TICKS
    timer: asyncio.TimerHandle

    def heard() -> None:
        nonlocal quiet
        quiet = 0

    def tick() -> None:
        nonlocal quiet, timer
        quiet += 1
        if quiet == _TICKS // 2 + 1:
            on_half()
        if quiet > _TICKS:
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(tick_s if quiet < _TICKS else tick_s / _TICKS, tick)

    async with asyncio.timeout(None) as timeout:
        timer = loop.call_later(tick_s, tick)
        try:
            yield heard
        finally:
            timer.cancel()
