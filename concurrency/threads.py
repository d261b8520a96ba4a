"""Blocking work in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

#: Niceness, as of nice(1), of threads that load: about a tenth of a core that others want.
LOAD_NICENESS = 10


def start_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run `work` in a new daemon thread; the future of its result. It cannot be cancelled."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


async def run_in_thread(work: Callable[[], T], *, low_priority: bool = True) -> T:
    """The result of `work`, run in a new thread. Cancelling the wait does not stop the work.

    With `low_priority` a worker that loads does not slow down streams of other workers on the same
    cores. Threads that `work` starts inherit the priority for good, so start threads that serve
    elsewhere. A pool's thread would not do: one that has run tensor operations keeps its OpenMP
    team until it ends, and a second team slows down every step (kv_transfer.data.threads).
    """

    def run() -> T:
        # Elsewhere than on Linux priorities belong to whole processes.
        if low_priority and sys.platform == "linux":
            _lower_priority()
        return work()

    return await asyncio.wrap_future(start_thread(run, name="load"))


def _lower_priority() -> None:
    """Raise this thread's niceness to LOAD_NICENESS; never lower it, which needs privileges."""
    thread = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*thread, max(LOAD_NICENESS, os.getpriority(*thread)))
