"""Silence is the peer's, never our own stall."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from concurrency.event_loop import silence_limit
from tests.support.transfer_net import SimLoop


async def test_silence_ends_the_block() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with silence_limit(0.1):
            await asyncio.Event().wait()
    assert time.monotonic() - start > 0.09


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


def test_what_arrives_while_we_stall_is_heard_before_the_peer_counts_as_silent() -> None:
    loop = SimLoop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def follow() -> None:
        async with silence_limit(1.0) as heard:
            while await loop.sock_recv(ours, 1):
                heard()

    def turn(seconds: float) -> None:
        loop.now += seconds
        loop.settle()

    following = loop.run(follow())
    for _ in range(3):
        turn(0.26)
    theirs.send(b"x")
    turn(2.0)  # a stall: what came and the time for the next look are there at once
    for _ in range(3):
        turn(0.26)
    assert not following.done()
    for _ in range(2):
        turn(0.26)
    with pytest.raises(TimeoutError):
        following.result()
    for end in (ours, theirs):
        end.close()
    loop.close()


async def test_an_error_inside_passes_through() -> None:
    with pytest.raises(KeyError):
        async with silence_limit(0.2):
            raise KeyError("x")


async def test_half_of_the_silence_is_told_once() -> None:
    told: list[str] = []
    with pytest.raises(TimeoutError):
        async with silence_limit(0.1, on_half=lambda: told.append("half")):
            await asyncio.Event().wait()
    assert told == ["half"]
