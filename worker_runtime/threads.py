"""Blocking work in a thread that ends with it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Priority of loading, as of nice(1), or lower: of a core that others want, it gets about a tenth.
LOAD_NICENESS = 10


async def in_own_thread(work: Callable[[], T]) -> T:
    """The result of `work`, run in a new thread.

    It runs below the other threads' priority: a worker that loads beside others must not hold up
    their streams. Not a pool's thread: one that has run tensor operations keeps its OpenMP team
    until it ends, and a second team in the process slows down every step (see
    kv_transfer.single_thread).
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            if sys.platform == "linux":  # elsewhere priorities belong to whole processes
                _step_back()
            result, error = work(), None
        except BaseException as caught:  # noqa: BLE001 - it is raised where the result is awaited
            result, error = None, caught
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done


def _step_back() -> None:
    """Lower this thread's priority; one that is lower already may not be raised."""
    me = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*me, max(LOAD_NICENESS, os.getpriority(*me)))
