"""A replica's connection to a directory that stands still."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import LifecycleSection
from cluster.membership import directory_client
from cluster.membership.directory_client import DirectoryClient, turn_after
from cluster.membership.table import Pool, Replica, View
from protocol.messages import WorkerLoad
from protocol.states import WorkerState

TIMES = LifecycleSection(heartbeat_s=0.02, expiry_s=5.0)
REPLICAS = tuple(
    Replica(name=name, epoch=1, pool=Pool.DECODE, state=WorkerState.READY) for name in "abc"
)

SHORT = {"_WATCH_S": 0.02, "_ANSWER_S": 0.02, "_FROZEN_S": 0.1, "_TURN_S": 1000.0}


class Freezing:
    """A directory that answers until it is frozen, and again when it was replaced and then asked
    `asks_to_start` times."""

    def __init__(self, asks_to_start: int = 0) -> None:
        self.frozen = asyncio.Event()
        self.killed: list[bool] = []
        self._asks_to_start = self._asks_left = asks_to_start
        self.follow = SimpleNamespace(remote=self._follow)
        self.report = SimpleNamespace(remote=self._report)

    def kill(self, handle: Any, *, no_restart: bool) -> None:
        assert handle is self
        self.killed.append(no_restart)
        self._asks_left = self._asks_to_start

    async def _follow(self, incarnation: int, version: int, timeout_s: float) -> View:
        if self.frozen.is_set():
            self._asks_left -= bool(self.killed)
            if not self.killed or self._asks_left > 0:
                await asyncio.Future()
        await asyncio.sleep(0.01)
        return View(incarnation=1, version=version + 1, replicas=REPLICAS)

    async def _report(self, replica: Replica, load: WorkerLoad) -> None:
        pass


async def test_one_replica_replaces_a_frozen_directory_and_lets_it_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Freezing(asks_to_start=12)
    monkeypatch.setattr(directory_client, "find_directory", lambda: directory)
    for name, value in SHORT.items():
        monkeypatch.setattr(directory_client, name, value)
    monkeypatch.setattr("ray.kill", directory.kill)
    views: dict[str, list[View]] = {replica.name: [] for replica in REPLICAS}
    clients = [
        DirectoryClient(
            TIMES,
            describe=partial(lambda replica: replica, replica),
            load=WorkerLoad,
            on_view=views[replica.name].append,
        )
        for replica in REPLICAS
    ]

    async def all_told() -> None:
        for seen in views.values():
            seen.clear()
        while not all(views.values()):
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60):
        for client in clients:
            client.start()
        await all_told()
        directory.frozen.set()
        while not directory.killed:
            await asyncio.sleep(0.01)
        await all_told()
    assert directory.killed == [False]
    for client in clients:
        for task in client._tasks:
            task.cancel()


def test_replicas_replace_a_directory_one_after_the_other() -> None:
    def acting(silence_s: float) -> list[tuple[int, int]]:
        turns = [turn_after(silence_s, place=place, count=3) for place in range(3)]
        return [(place, turn) for place, turn in enumerate(turns) if turn is not None]

    assert acting(8.9) == []
    assert acting(9.0) == acting(23.9) == [(0, 0)]
    assert acting(24.0) == acting(53.9) == [(1, 1)]
    assert acting(54.0) == acting(113.9) == [(2, 2)]
    assert acting(114.0) == [(0, 3)]


async def test_a_call_that_does_not_return_holds_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the head cannot be reached."""
    directory, release, calls = Freezing(), threading.Event(), []
    monkeypatch.setattr(directory_client, "find_directory", lambda: directory)
    for name, value in (SHORT | {"_FROZEN_S": 0.0, "_TURN_S": 0.01}).items():
        monkeypatch.setattr(directory_client, name, value)

    def kill(handle: Any, *, no_restart: bool) -> None:
        calls.append(handle)
        release.wait(20)

    monkeypatch.setattr("ray.kill", kill)
    directory.frozen.set()
    client = DirectoryClient(
        LifecycleSection(heartbeat_s=0.01, expiry_s=0.05),
        describe=lambda: REPLICAS[0],
        load=WorkerLoad,
        on_view=lambda view: None,
    )
    client.start()
    await asyncio.sleep(0.6)
    assert len(calls) == 1
    release.set()
    for task in client._tasks:
        task.cancel()
