"""Background tasks of an event loop: kept until they end, their failures logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from observability.logging import get_logger
from protocol.errors import BatonError

log = get_logger(__name__)


class Tasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` on the current loop; tasks start in the order of these calls."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Wait at most `grace_s` seconds for running tasks, then cancel them and wait for their
        end."""
        if self._tasks and grace_s:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BatonError):
            log.warning("background task failed", extra={"error": error.message})
        elif error is not None:
            log.error("background task failed", exc_info=error)
