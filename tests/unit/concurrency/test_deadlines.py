"""Deadlines ring in time, and those of hand-offs that are over are not kept."""

from __future__ import annotations

import asyncio

from concurrency.event_loop import Deadlines
from protocol.ids import RequestKey


async def test_entries_of_what_is_over_are_dropped_and_the_others_still_ring() -> None:
    loop = asyncio.get_running_loop()
    live = {RequestKey(f"live{number}") for number in range(10)}
    rung: set[RequestKey] = set()

    def ring() -> None:
        rung.update(deadlines.due(loop.time()))

    deadlines = Deadlines(now=loop.time, on_due=ring, alive=live.__contains__)
    for number, key in enumerate(sorted(live, key=str)):
        deadlines.add(loop.time() + 0.05 + 0.001 * number, key)
        for other in range(1000):
            deadlines.add(loop.time() + 600.0, RequestKey(f"over{number}-{other}"))
    assert len(deadlines._heap) < 200
    async with asyncio.timeout(60):
        while rung < live:
            await asyncio.sleep(0.01)
    deadlines.close()
