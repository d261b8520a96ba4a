"""Child processes, forked from one server that has imported torch and all that they run once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOADED = [
    "pytest",
    "tests.support.chaos_host",
    "tests.support.pair",
    "tests.support.rank_process",
    "tests.support.transfer_process",
]


def forks() -> ForkServerContext:
    """The context whose processes start in milliseconds, with no thread or lock of the parent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


async def obey(host: object, pipe: Connection) -> None:
    """Run the methods of `host` that the parent names, all at once, until it hangs up; then the
    process ends. What comes back carries the command's number."""
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    closed = asyncio.Event()

    async def answer(number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            result = await getattr(host, name)(*args)
        except Exception as error:  # noqa: BLE001 - it is the parent's to judge
            result = error
        pipe.send((number, result))

    def start(command: tuple[int, str, tuple[Any, ...]]) -> None:
        task = loop.create_task(answer(*command))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(start, pipe.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read, daemon=True).start()
    await closed.wait()
    os._exit(0)
