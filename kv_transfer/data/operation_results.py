"""What the operations of one order come to, and how an event loop waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kv_transfer.backends.pool_access import PoolAccess
from kv_transfer.data.rank_commands import PartResult, RankResult
from protocol.errors import BatonError

T = TypeVar("T")
#: Takes what an order came to, once, in any thread.
Finish = Callable[[RankResult], None]


async def answer_of(start: Callable[[Callable[[T], None]], object]) -> T:
    """Wait on the event loop for what `start` has somebody call back with, once, in any thread.
    Whoever stops waiting changes nothing."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[T] = loop.create_future()

    def wake(answer: T) -> None:
        if not over.done():
            over.set_result(answer)

    def ended(answer: T) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(wake, answer)

    start(ended)
    return await over


class Gathering:
    """Calls `finish` with the outcome of `count` messages, once every one has ended: all results,
    or the first error."""

    def __init__(self, count: int, finish: Finish) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._finish = finish
        self._parts: list[PartResult] = []
        self._error: BatonError | None = None
        if count == 0:
            finish(RankResult())

    def __call__(self, ended: PartResult | BatonError | None) -> None:
        """One more has ended, in any thread."""
        with self._lock:
            if isinstance(ended, PartResult):
                self._parts.append(ended)
            elif self._error is None:
                self._error = ended
            self._left -= 1
            last = self._left == 0
        if last:
            error = None if self._error is None else self._error.info()
            self._finish(RankResult(error=error, parts=tuple(self._parts)))


def revoke(accesses: list[PoolAccess], finish: Finish) -> None:
    """Revoke accesses; `finish` is called once none of them is in progress."""
    gathering = Gathering(len(accesses), finish)
    for access in accesses:
        access.revoke().add_done_callback(lambda _: gathering(None))
