"""A replica's connection to a directory that stands still."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import LifecycleSection
from cluster.membership import directory_client
from cluster.membership.directory_client import DirectoryClient
from cluster.membership.table import Pool, Replica, View, ViewChange
from protocol.messages import WorkerLoad
from protocol.states import WorkerState

TIMES = LifecycleSection(heartbeat_s=0.02, expiry_s=5.0)
REPLICAS = tuple(
    Replica(name=name, epoch=1, pool=Pool.DECODE, state=WorkerState.READY) for name in "abc"
)

SHORT = {"_ANSWER_S": 0.02, "_FROZEN_S": 0.1, "_RUNNING_S": 0.05}


class Freezing:
    """A directory that answers until it is frozen, and again when it was replaced and then asked
    `asks_to_start` times; and what Ray knows of it. Its long polls are
    never answered."""

    def __init__(self, asks_to_start: int = 0) -> None:
        self.frozen = asyncio.Event()
        self.killed: list[str] = []  # in which state
        self.num_asked = 0
        self._asks_to_start = self._asks_left = asks_to_start
        self.follow = SimpleNamespace(remote=self._follow)
        self.report = SimpleNamespace(remote=self._report)

    def kill(self, handle: Any, *, no_restart: bool) -> None:
        assert (handle, no_restart) == (self, False)
        self.killed.append(self.state(self)["State"])
        self._asks_left = self._asks_to_start

    def state(self, handle: Any) -> dict[str, Any]:
        assert handle is self
        starts = self.killed and self._asks_left > 0
        return {"State": "RESTARTING" if starts else "ALIVE", "NumRestarts": len(self.killed)}

    async def _follow(self, incarnation: int, version: int, timeout_s: float) -> View:
        return await asyncio.Future()

    async def _report(
        self, replica: Replica, load: WorkerLoad, known: tuple[int, int] | None
    ) -> View | None:
        self.num_asked += 1
        if self.frozen.is_set():
            self._asks_left -= bool(self.killed)
            if not self.killed or self._asks_left > 0:
                await asyncio.Future()
        return known and View(incarnation=1, version=self.num_asked, replicas=REPLICAS)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Freezing:
    found = Freezing(asks_to_start=12)
    monkeypatch.setattr(directory_client, "find_directory", lambda: found)
    monkeypatch.setattr(directory_client, "actor_state", found.state)
    monkeypatch.setattr("ray.kill", found.kill)
    for name, value in SHORT.items():
        monkeypatch.setattr(directory_client, name, value)
    return found


async def test_a_frozen_directory_is_replaced_and_then_left_to_start(directory: Freezing) -> None:
    views: list[View] = []
    client = DirectoryClient(
        TIMES, describe=lambda: REPLICAS[0], load=WorkerLoad, on_view=views.append
    )
    async with asyncio.timeout(60):
        client.start()
        while not views:
            await asyncio.sleep(0.01)
        directory.frozen.set()
        while not directory.killed:
            await asyncio.sleep(0.01)
        views.clear()
        while not views:
            await asyncio.sleep(0.01)
    assert directory.killed == ["ALIVE"]
    for task in client._tasks:
        task.cancel()


async def test_a_directory_that_answers_heartbeats_only_is_not_replaced(
    directory: Freezing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has much to do, as while a thousand replicas join."""
    monkeypatch.setattr(directory_client, "_WATCH_S", 0.02)
    client = DirectoryClient(
        TIMES,
        describe=lambda: REPLICAS[0],
        load=WorkerLoad,
        on_view=lambda view: None,
        at_once=True,
    )
    client.start()
    async with asyncio.timeout(60):
        while directory.num_asked < 10:
            await asyncio.sleep(0.01)
    assert not directory.killed
    for task in client._tasks:
        task.cancel()


async def test_answers_that_overtake_each_other_do_not_take_a_view_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory_client, "find_directory", Freezing)
    views: list[View] = []
    client = DirectoryClient(
        TIMES, describe=lambda: REPLICAS[0], load=WorkerLoad, on_view=views.append
    )
    client._take(View(incarnation=1, version=5, replicas=REPLICAS))
    fields = {"replicas": (), "sizes": ()}
    client._take(ViewChange(incarnation=1, version=7, gone=("a",), **fields))
    client._take(ViewChange(incarnation=1, version=6, gone=("b",), **fields))
    client._take(ViewChange(incarnation=2, version=9, gone=("b",), **fields))
    client._take(ViewChange(incarnation=1, version=7, gone=(), **fields))  # nothing new
    assert [[r.name for r in view.replicas] for view in views] == [["a", "b", "c"], ["b", "c"]]


async def test_a_call_that_does_not_return_holds_one_thread(
    directory: Freezing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the head cannot be reached."""
    release, calls = threading.Event(), []

    def hang(handle: Any) -> dict[str, Any]:
        calls.append(handle)
        release.wait(60)
        return {}

    monkeypatch.setattr(directory_client, "actor_state", hang)
    directory.frozen.set()
    client = DirectoryClient(
        LifecycleSection(heartbeat_s=0.01, expiry_s=0.05),
        describe=lambda: REPLICAS[0],
        load=WorkerLoad,
        on_view=lambda view: None,
    )
    client.start()
    async with asyncio.timeout(60):
        while directory.num_asked < 20:
            await asyncio.sleep(0.01)
        assert len(calls) == 1
        release.set()
        while len(calls) < 2:  # it is tried again
            await asyncio.sleep(0.01)
    for task in client._tasks:
        task.cancel()
