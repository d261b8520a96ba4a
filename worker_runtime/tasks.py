"""Keeps every task that a callback starts, and reports the ones that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from observability.logging import get_logger
from protocol.errors import BatonError

log = get_logger(__name__)


class Tasks:
    """A set of running tasks; those still running at the end are cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` on the current loop and keep it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if isinstance(error, BatonError):
            log.warning("background work failed", extra={"error": error.message})
        else:
            log.error("background work failed", exc_info=error)
