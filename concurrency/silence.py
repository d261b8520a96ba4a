"""Noticing that a peer is silent, without mistaking our own stall for its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_TICKS = 4


@asynccontextmanager
async def silence_limit(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """End the block with TimeoutError when the peer says nothing for about `limit_s` seconds;
    yields what to call whenever it has said something.

    The timer is set again only when its tick has run, so a stall of this event loop, however long,
    counts as one quiet tick: what arrived meanwhile is heard before the next. One more, a short
    one, follows those that make the limit, in case they ended in a stall.
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
