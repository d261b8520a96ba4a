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


async def test_keys_ring_at_their_deadlines_and_never_before_in_whatever_order_they_come() -> None:
    loop = asyncio.get_running_loop()
    start, rung, num_rings = loop.time(), list[tuple[RequestKey, float]](), 0

    def ring() -> None:
        nonlocal num_rings
        num_rings += 1
        now = loop.time()
        rung.extend((key, now) for key in deadlines.due(now))

    deadlines = Deadlines(now=loop.time, on_due=ring, alive=lambda _: True)
    times = {RequestKey(f"r{n}"): start + 0.01 * n for n in (9, 4, 7, 1, 5, 12, 2, 3)}
    deadlines.add(start + 600.0, RequestKey("late"))
    for key, at in times.items():
        deadlines.add(at, key)
    async with asyncio.timeout(60):
        while len(rung) < len(times):
            await asyncio.sleep(0.01)
    assert [key for key, _ in rung] == sorted(times, key=times.__getitem__)
    assert all(now >= times[key] for key, now in rung)
    deadlines.add(loop.time() + 0.01, RequestKey("closed"))
    deadlines.close()
    before = num_rings
    await asyncio.sleep(0.05)
    assert num_rings == before
