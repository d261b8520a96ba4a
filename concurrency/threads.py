"""Blocking work in a thread that ends with it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

#: Priority of loading, as of nice(1), or lower: of a core that others want, it gets about a tenth.
LOAD_NICENESS = 10


async def in_own_thread(work: Callable[[], T], *, steps_back: bool = True) -> T:
    """The result of `work`, run in a new thread.

    It `steps_back` below the other threads' priority: a worker that loads beside others must not
    hold up their streams. Every thread that it starts does so, too, and for good, so that threads
    that serve have to be started elsewhere. Not a pool's thread: one that has run tensor operations
    keeps its OpenMP team until it ends, and a second team in the process slows down every step (see
    kv_transfer.data.thread_setup).
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever stops waiting does not stop the work

    def run() -> None:
        try:
            # Elsewhere than on Linux priorities belong to whole processes.
            if steps_back and sys.platform == "linux":
                _step_back()
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(done)


def _step_back() -> None:
    """Lower this thread's priority; one that is lower already may not be raised."""
    me = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*me, max(LOAD_NICENESS, os.getpriority(*me)))
