"""Follows the directory's views; every replica does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError

from cluster.membership import View
from observability.logging import get_logger

log = get_logger(__name__)

_WATCH_S = 5.0


async def views(directory: Any, *, pause_s: float) -> AsyncIterator[View]:
    """The view whenever it changes, and every few seconds when it does not. A directory that does
    not answer is asked again after `pause_s`."""
    incarnation = version = -1
    while True:
        try:
            call = directory.watch.remote(incarnation, version, _WATCH_S)
            async with asyncio.timeout(2 * _WATCH_S):
                view: View = await call
        except (RayError, TimeoutError) as error:
            log.warning("the directory does not answer", extra={"error": str(error)})
            await asyncio.sleep(pause_s)
            continue
        incarnation, version = view.incarnation, view.version
        yield view
