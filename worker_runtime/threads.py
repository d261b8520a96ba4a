"""Blocking work in a thread that ends with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """The result of `work`, run in a new thread.

    Not a pool's thread: one that has run tensor operations keeps its OpenMP team until it ends, and
    a second team in the process slows down every step (see kv_transfer.single_thread).
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
            result, error = work(), None
        except BaseException as caught:  # noqa: BLE001 - it is raised where the result is awaited
            result, error = None, caught
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
