"""Silence is the peer's, never our own stall."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.silence import silence_limit


async def test_silence_ends_the_block() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with silence_limit(0.1):
            await asyncio.sleep(5)
    assert 0.09 < time.monotonic() - start < 4


async def test_being_heard_keeps_it_open() -> None:
    async with silence_limit(0.2) as heard:
        for _ in range(8):
            await asyncio.sleep(0.05)
            heard()


async def test_a_stall_of_our_own_loop_does_not_count() -> None:
    async with silence_limit(0.1) as heard:
        time.sleep(0.25)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(0.01)
        heard()
        await asyncio.sleep(0.05)


async def test_an_error_inside_passes_through() -> None:
    with pytest.raises(KeyError):
        async with silence_limit(0.2):
            raise KeyError("x")
