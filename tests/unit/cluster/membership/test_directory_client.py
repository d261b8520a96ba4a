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
from cluster.membership.table import Pool, Replica, View
from protocol.messages import WorkerLoad
from protocol.states import WorkerState

TIMES = LifecycleSection(heartbeat_s=0.02, expiry_s=5.0)
REPLICAS = tuple(
    Replica(name=name, epoch=1, pool=Pool.DECODE, state=WorkerState.READY) for name in "abc"
)


class Freezing:
    """A directory that answers until it is frozen, and again after it was replaced."""

    def __init__(self) -> None:
        self.frozen = asyncio.Event()
        self.killed: list[bool] = []
        self.follow = SimpleNamespace(remote=self._follow)
        self.report = SimpleNamespace(remote=self._report)

    async def _follow(self, incarnation: int, version: int, timeout_s: float) -> View:
        if self.frozen.is_set() and not self.killed:
            await asyncio.Future()
        await asyncio.sleep(0.01)
        return View(incarnation=1, version=version + 1, replicas=REPLICAS)

    async def _report(self, replica: Replica, load: WorkerLoad) -> None:
        pass


@pytest.mark.parametrize(("name", "acts"), [("a", True), ("c", False)])
async def test_a_frozen_directory_is_replaced_by_one_replica_after_the_other(
    name: str, acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Freezing()
    monkeypatch.setattr(directory_client, "find_directory", lambda: directory)
    monkeypatch.setattr(directory_client, "_WATCH_S", 0.02)
    monkeypatch.setattr(directory_client, "_ANSWER_S", 0.02)
    monkeypatch.setattr(directory_client, "_FROZEN_S", 0.1)

    def kill(handle: Any, *, no_restart: bool) -> None:
        assert handle is directory
        directory.killed.append(no_restart)

    monkeypatch.setattr("ray.kill", kill)
    views: list[View] = []
    client = DirectoryClient(
        TIMES,
        describe=lambda: next(r for r in REPLICAS if r.name == name),
        load=WorkerLoad,
        on_view=views.append,
    )
    client.start()
    while not views:
        await asyncio.sleep(0.01)
    directory.frozen.set()
    await asyncio.sleep(0.5)
    assert directory.killed == ([False] if acts else [])
    assert (client.silence_s < 0.3) is acts
    for task in client._tasks:
        task.cancel()


async def test_a_call_that_does_not_return_holds_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the head cannot be reached."""
    directory, release, calls = Freezing(), threading.Event(), []
    monkeypatch.setattr(directory_client, "find_directory", lambda: directory)
    for name, value in (("_WATCH_S", 0.01), ("_ANSWER_S", 0.01), ("_FROZEN_S", 0.0)):
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
