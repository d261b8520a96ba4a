"""Timeout for a peer that sends nothing, which a stall of this process does not trigger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_TICKS = 4


@asynccontextmanager
async def silence_limit(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """End the block with TimeoutError when the peer sends nothing for about `limit_s` seconds;
    yields the function to call whenever something arrives.

    The limit is counted in ticks, and the next tick is scheduled only when the last has run. A
    stall of this event loop, however long, thus counts as one tick, and what arrived meanwhile is
    processed before the next. A short extra tick covers a stall that ends the last one.
    """
    loop, quiet, tick_s = asyncio.get_running_loop(), 0, limit_s / _TICKS
    timer: asyncio.TimerHandle

    def heard() -> None:
        nonlocal quiet
        quiet = 0

    def tick() -> None:
        nonlocal quiet, timer
        quiet += 1
        if quiet > _TICKS:
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(tick_s if quiet < _TICKS else tick_s / _TICKS, tick)

    async with asyncio.timeout(None) as timeout:
        timer = loop.call_later(tick_s, tick)
        try:
            yield heard
        finally:
            timer.cancel()
