"""The store: bounded, expiring, private to each caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import InvalidRequest, NotFound
from router.responses.store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, text: str = "", owner: str = "") -> StoredResponse:
    response: dict[str, Any] = {"id": name, "text": text}
    return StoredResponse(owner=owner, response=response, items=[], messages=[])


def test_the_oldest_go_first() -> None:
    store = ResponseStore(max_bytes=20_000, keep_s=10, clock=Clock())
    for i in range(10):
        store.put(entry(str(i), "a" * 4000))
        assert store.num_bytes <= 20_000
    assert len(store) == 3
    assert store.get("9", "").response["text"] == "a" * 4000
    with pytest.raises(NotFound):
        store.get("6", "")
    store.put(entry("8", "a" * 4000))  # replaced: counts once
    assert len(store) == 3
    store.put(entry("big", "a" * 30_000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_they_expire() -> None:
    clock = Clock()
    store = ResponseStore(max_bytes=1 << 20, keep_s=10, clock=clock)
    store.put(entry("a"))
    clock.now = 9.0
    store.put(entry("b"))
    clock.now = 10.0
    with pytest.raises(NotFound):
        store.get("a", "")
    assert store.get("b", "")
    assert len(store) == 1


def test_another_callers_do_not_exist() -> None:
    store = ResponseStore(max_bytes=1 << 20, keep_s=10, clock=Clock())
    store.put(entry("a", owner="ann"))
    with pytest.raises(NotFound):
        store.get("a", "bob")
    with pytest.raises(NotFound):
        store.delete("a", "bob")
    with pytest.raises(InvalidRequest) as caught:
        store.messages_up_to("a", "bob")
    assert caught.value.param == "previous_response_id"
    store.delete("a", "ann")
    assert store.num_bytes == 0


async def test_running_ones_stay_until_they_have_ended() -> None:
    clock = Clock()
    store = ResponseStore(max_bytes=1 << 20, keep_s=10, clock=clock)
    running = entry("a")
    running.task = asyncio.create_task(asyncio.sleep(60))
    store.put(running)
    clock.now = 11.0
    assert store.get("a", "") is running
    store.delete("a", "")
    await asyncio.wait({running.task})
    assert running.task.cancelled()
