"""Joins what several operations of one order come to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kv_transfer.access import Access
from kv_transfer.links import Operation
from kv_transfer.orders import Outcome, PartResult
from protocol.errors import BatonError, Internal


def done(outcome: Outcome) -> Future[Outcome]:
    """A future that is done."""
    future = _running()
    future.set_result(outcome)
    return future


def _running() -> Future[Outcome]:
    """A future that cannot be cancelled: whoever stops waiting does not stop the order."""
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()
    return future


class _Countdown:
    """Calls `finish` when `count` futures are done."""

    def __init__(self, count: int, finish: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._finish = finish
        if count == 0:
            finish()

    def __call__(self, _: Future[PartResult] | Future[None]) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._finish()


def joined(operations: list[Operation]) -> Future[Outcome]:
    """The outcome of several messages: all results, or the first error once every one has ended."""
    result = _running()

    def finish() -> None:
        errors = [e for e in (op.result.exception() for op in operations) if e is not None]
        if not errors:
            result.set_result(Outcome(parts=tuple(op.result.result() for op in operations)))
            return
        first = errors[0]
        error = first if isinstance(first, BatonError) else Internal(str(first))
        result.set_result(Outcome(error=error.info()))

    countdown = _Countdown(len(operations), finish)
    for operation in operations:
        operation.result.add_done_callback(countdown)
    return result


def when_over(accesses: list[Access]) -> Future[Outcome]:
    """Revoke accesses; done once none of them is in progress."""
    over = _running()
    countdown = _Countdown(len(accesses), lambda: over.set_result(Outcome()))
    for access in accesses:
        access.revoke().add_done_callback(countdown)
    return over
