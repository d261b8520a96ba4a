"""What the operations of one order come to, and how the event loop waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kv_transfer.access import Access
from kv_transfer.orders import Outcome, PartResult
from protocol.errors import BatonError

T = TypeVar("T")


def unanswered() -> Future[Outcome]:
    """A future that cannot be cancelled: whoever stops waiting does not stop the order."""
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()
    return future


def done(outcome: Outcome) -> Future[Outcome]:
    """A future that is done."""
    future = unanswered()
    future.set_result(outcome)
    return future


async def answer_to(future: Future[T]) -> T:
    """Wait on the event loop for what another thread ends; a fraction of asyncio.wrap_future.
    Whoever stops waiting changes nothing."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def ended(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(ended)
    await over
    return future.result()


class Gathering:
    """Calls `finish` with the outcome of `count` messages, once every one has ended: all results,
    or the first error."""

    def __init__(self, count: int, finish: Callable[[Outcome], None]) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._finish = finish
        self._parts: list[PartResult] = []
        self._error: BatonError | None = None
        if count == 0:
            finish(Outcome())

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
            self._finish(Outcome(error=error, parts=tuple(self._parts)))


def when_over(accesses: list[Access]) -> Future[Outcome]:
    """Revoke accesses; done once none of them is in progress."""
    answer = unanswered()
    gathering = Gathering(len(accesses), answer.set_result)
    for access in accesses:
        access.revoke().add_done_callback(lambda _: gathering(None))
    return answer
