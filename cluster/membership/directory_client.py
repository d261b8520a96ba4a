"""A replica's dealings with the directory, which may be silent for a while: that is logged, and the
replica goes on with what it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError

from cluster.config.schema import LifecycleSection
from cluster.membership.directory import find_directory
from cluster.membership.table import Member, View
from observability.logging import get_logger

log = get_logger(__name__)

_WATCH_S = 5.0


class Registration:
    """What a replica tells the directory about itself, and learns of the others."""

    def __init__(self, times: LifecycleSection) -> None:
        self.directory = find_directory()
        self._times = times

    async def report(self, member: Member) -> None:
        """Say what and how the replica is."""
        await self._tell(self.directory.report.remote(member))

    async def leave(self, member: Member) -> None:
        """Say that the replica has ended."""
        await self._tell(self.directory.leave.remote(member.name, member.epoch))

    async def views(self) -> AsyncIterator[View]:
        """The view whenever it changes, and every few seconds when it does not."""
        incarnation = version = -1
        while True:
            try:
                call = self.directory.watch.remote(incarnation, version, _WATCH_S)
                async with asyncio.timeout(2 * _WATCH_S):
                    view: View = await call
            except (RayError, TimeoutError) as error:
                _silent(error)
                await asyncio.sleep(self._times.heartbeat_s)
                continue
            incarnation, version = view.incarnation, view.version
            yield view

    async def _tell(self, call: Any) -> None:
        try:
            async with asyncio.timeout(self._times.expiry_s):
                await call
        except (RayError, TimeoutError) as error:
            _silent(error)


def _silent(error: Exception) -> None:
    log.warning("the directory does not answer", extra={"error": str(error)})
