"""How replicas leave: members of the directory until they have ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import ClusterConfig, LifecycleSection, ModelSection
from cluster.membership.directory import Directory
from cluster.membership.directory_client import Registration
from cluster.membership.table import Member, View
from cluster.serve.router_replica import RouterReplica
from cluster.serve.worker_replica import WorkerReplica
from protocol.ids import Role, WorkerRef
from protocol.states import WorkerState

TIMES = LifecycleSection(heartbeat_s=0.01, expiry_s=600.0)
CONFIG = ClusterConfig(model=ModelSection(name="tiny"), lifecycle=TIMES)
REF = WorkerRef(worker_id="prefill-1", epoch=7, role=Role.PREFILL, address="127.0.0.1:1")
DRAINING = WorkerState.DRAINING


class Told(Directory):
    """A directory as its callers see it, and what it was told."""

    def __init__(self) -> None:
        super().__init__(secret=b"s" * 16, config=CONFIG)
        self.reports: list[WorkerState] = []
        self.left = False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return SimpleNamespace(remote=method) if name in ("report", "leave", "watch") else method

    async def report(self, member: Member) -> None:
        self.reports.append(member.state)

    async def leave(self, name: str, epoch: int) -> None:
        self.left = True

    async def watch(self, incarnation: int, version: int, timeout_s: float) -> View:
        return await asyncio.Future()


class Busy:
    """A worker or router with a request that ends when it is told to."""

    router_id = "router-1"
    addresses = SimpleNamespace(http="h:1", grpc="h:2", metrics="h:3")
    ready = True

    def __init__(self) -> None:
        self.state = WorkerState.READY
        self.over = asyncio.Event()

    def status(self) -> Any:
        return SimpleNamespace(state=self.state)

    async def drain(self, timeout_s: float) -> bool:
        self.state = DRAINING
        return await self.over.wait()

    async def retire(self) -> bool:
        return await self.over.wait()

    async def stop(self) -> None:
        assert self.over.is_set()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr("cluster.membership.directory_client.find_directory", lambda: told)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    return told


@pytest.mark.parametrize("kind", [WorkerReplica, RouterReplica])
async def test_who_leaves_is_heard_of_until_it_has_ended(
    kind: Any, directory: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be taken off after `expiry_s`, and others would give up its hand-offs."""
    leave, busy = kind.__del__, Busy()
    monkeypatch.delattr(kind, "__del__")  # Serve calls it; nobody else is to
    replica = kind.__new__(kind)
    fields = {"_config": CONFIG, "_registration": Registration(TIMES), "_finished": False}
    fields |= {"_worker": busy, "_router": busy, "_ref": REF, "_epoch": 7}
    fields |= {"_state": WorkerState.READY}
    for name, value in fields.items():
        setattr(replica, name, value)
    replica._heart = asyncio.create_task(replica._beat())
    replica._watch = asyncio.create_task(replica._follow())
    async with asyncio.timeout(60):
        leaving = asyncio.create_task(leave(replica))
        while directory.reports.count(DRAINING) < 4:
            await asyncio.sleep(0)
        assert not directory.left
        busy.over.set()
        await leaving
    assert directory.left
    reports = directory.reports.count(DRAINING)
    await asyncio.gather(replica._heart, replica._watch, return_exceptions=True)
    assert replica._heart.cancelled()
    assert replica._watch.cancelled()
    assert directory.reports.count(DRAINING) == reports
