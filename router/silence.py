"""Noticing that a peer is silent, without mistaking our own stall for its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICKS = 4


class Silence:
    """Counts quiet ticks.

    The timer is set again only when its tick has run, so a stall of this event loop, however long,
    counts as one tick: what arrived meanwhile is heard before the next.
    """

    def __init__(self, timeout: asyncio.Timeout, limit_s: float) -> None:
        self._timeout = timeout
        self._tick_s = limit_s / _TICKS
        self._quiet = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def heard(self) -> None:
        """The peer has said something."""
        self._quiet = 0

    def stop(self) -> None:
        """Stop counting."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._quiet += 1
        if self._quiet >= _TICKS:
            self._timeout.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)


@asynccontextmanager
async def silence_limit(limit_s: float) -> AsyncIterator[Silence]:
    """End the block with TimeoutError when nothing is `heard()` for about `limit_s` seconds."""
    async with asyncio.timeout(None) as timeout:
        silence = Silence(timeout, limit_s)
        try:
            yield silence
        finally:
            silence.stop()
