"""Graceful shutdown of replicas: heartbeats continue until the last request has ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import ClusterConfig, LifecycleSection, ModelSection
from cluster.membership.directory import Directory
from cluster.membership.directory_client import DirectoryClient
from cluster.membership.table import Pool, Replica, ReplicaTable, View
from cluster.serve.router_replica import RouterReplica, router_settings
from cluster.serve.worker_replica import WorkerReplica
from observability.export import MetricSet
from protocol.errors import Unavailable
from protocol.ids import Role, WorkerRef
from protocol.messages import WorkerLoad
from protocol.states import WorkerState
from router.served_model import ServedModel
from tests.support.tiny_text import write_model_text

TIMES = LifecycleSection(heartbeat_s=0.01, expiry_s=600.0)
CONFIG = ClusterConfig(model=ModelSection(name="tiny"), lifecycle=TIMES)
REF = WorkerRef(worker_id="prefill-1", epoch=7, role=Role.PREFILL, address="127.0.0.1:1")
DRAINING = WorkerState.DRAINING


class RecordingDirectory(Directory):
    """A directory behind an actor handle's interface that records its calls."""

    def __init__(self) -> None:
        super().__init__(secret=b"s" * 16, config=CONFIG)
        self.reports: list[WorkerState] = []
        self.left = False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return SimpleNamespace(remote=method) if name in ("report", "leave", "follow") else method

    async def report(self, replica: Replica, load: Any = None, known: Any = None) -> None:
        self.reports.append(replica.state)

    async def leave(self, name: str, epoch: int) -> None:
        self.left = True

    async def follow(self, incarnation: int, version: int, timeout_s: float) -> View:
        return await asyncio.Future()


class Busy:
    """A worker or router with one request, which ends when `over` is set."""

    router_id = "router-1"
    addresses = SimpleNamespace(http="h:1", grpc="h:2", metrics="h:3", responses="h:4")
    ready = True
    metrics = MetricSet(model_name="tiny")

    def __init__(self) -> None:
        self.state = WorkerState.READY
        self.over = asyncio.Event()
        self.stopped = self.broken = False

    def status(self) -> Any:
        return SimpleNamespace(state=self.state, role=Role.DECODE)

    def check_health(self) -> None:
        if self.broken:
            raise Unavailable("the engine broke")

    def peers_left(self, epochs: frozenset[int]) -> None:
        self.left = set(epochs)

    def peers_joined(self, refs: tuple[WorkerRef, ...]) -> None:
        self.joined = [ref.epoch for ref in refs]

    async def drain(self, timeout_s: float) -> bool:
        self.state = DRAINING
        return await self.over.wait()

    async def retire(self) -> bool:
        return await self.over.wait()

    async def stop(self) -> None:
        assert self.over.is_set()
        self.stopped = True


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> RecordingDirectory:
    recording = RecordingDirectory()
    monkeypatch.setattr("cluster.membership.directory_client.find_directory", lambda: recording)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    for kind in (WorkerReplica, RouterReplica):
        monkeypatch.setattr(kind, "shut_down", kind.__del__, raising=False)
        monkeypatch.delattr(kind, "__del__")  # Serve calls it; the interpreter must not
    return recording


def make(kind: Any, busy: Busy) -> Any:
    """A replica that serves, without Serve and without a real worker or router."""
    replica = kind.__new__(kind)
    replica._membership = DirectoryClient(
        TIMES,
        describe=replica._describe,
        load=WorkerLoad,
        on_view=replica._take_view,
    )
    fields = {"_worker": busy, "_ref": REF, "_drain_s": 60.0, "_draining": None}
    fields |= {"_peer_epochs": frozenset(), "_revision": "1/2"}
    fields |= {"_router": busy, "_epoch": 7, "_state": WorkerState.READY}
    for name, value in fields.items():
        setattr(replica, name, value)
    replica._membership.start()
    return replica


@pytest.mark.parametrize("kind", [WorkerReplica, RouterReplica])
async def test_heartbeats_continue_until_a_stopping_replica_has_ended(
    kind: Any, directory: RecordingDirectory
) -> None:
    """Without them the replica would expire, and peers would abort its hand-offs."""
    busy = Busy()
    replica = make(kind, busy)
    async with asyncio.timeout(60):
        leaving = asyncio.create_task(replica.shut_down())
        while directory.reports.count(DRAINING) < 4:
            await asyncio.sleep(0)
        assert not directory.left
        busy.over.set()
        await leaving
    assert directory.left
    assert busy.stopped
    reports = directory.reports.count(DRAINING)
    tasks = replica._membership._tasks
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    assert directory.reports.count(DRAINING) == reports


async def test_a_worker_with_a_drain_command_is_replaced_once_idle(
    directory: RecordingDirectory,
) -> None:
    busy = Busy()
    replica = make(WorkerReplica, busy)
    async with asyncio.timeout(60):
        while not directory.reports:
            await asyncio.sleep(0)
        await replica.check_health()
        busy.state = DRAINING  # by the drain command of the control channel
        while DRAINING not in directory.reports:
            await asyncio.sleep(0)
        await replica.check_health()
        busy.over.set()
        await replica._draining
        with pytest.raises(Unavailable, match="drained on request"):
            await replica.check_health()
        await replica.shut_down()
    assert directory.left


async def test_a_replica_that_is_broken_or_reports_no_more_is_replaced(
    directory: RecordingDirectory,
) -> None:
    busy = Busy()
    replicas = [make(kind, busy) for kind in (WorkerReplica, RouterReplica)]
    for replica in replicas:
        await replica.check_health()
    busy.broken = True
    with pytest.raises(Unavailable, match="the engine broke"):
        await replicas[0].check_health()
    busy.broken = False
    for replica in replicas:
        task = replica._membership._tasks[0]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(Unavailable, match="the heartbeat task ended"):
            await replica.check_health()
        for left in replica._membership._tasks:
            left.cancel()


async def test_the_worker_learns_which_peers_have_left(directory: RecordingDirectory) -> None:
    """Replicas that are missing from a view: left, replaced or expired."""
    busy, table = Busy(), ReplicaTable(incarnation=1, expiry_s=5.0)
    replica = make(WorkerReplica, busy)

    def report(name: str, epoch: int, pool: Pool = Pool.DECODE, *, now: float = 0.0) -> None:
        state = WorkerState.READY
        table.report(Replica(name=name, epoch=epoch, pool=pool, state=state), now)

    def left() -> set[int]:
        replica._take_view(table.view())
        return busy.left

    report("d1", 1)
    report("p1", 2, Pool.PREFILL)
    report("r1", 3, Pool.ROUTER)
    assert left() == set()
    assert busy.joined == [2, 1]
    table.report(Replica(name="d1", epoch=1, pool=Pool.DECODE, state=DRAINING), 1.0)
    table.leave("r1", 3)
    assert left() == set()
    assert busy.joined == [2]
    report("d1", 9, now=4.0)
    assert left() == {1}
    table.expire(6.0)
    assert left() == {2}
    assert left() == set()
    for task in replica._membership._tasks:
        task.cancel()


@pytest.mark.parametrize("configured", [None, 2000])
def test_a_routers_context_is_the_one_that_workers_take(
    tmp_path: Path, configured: int | None
) -> None:
    """Yarn extends what the model's file states."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    file = write_model_text(tmp_path, context=512) / "config.json"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    stated = json.loads(file.read_text()) | sizes | {"num_hidden_layers": 1, "rope_scaling": yarn}
    file.write_text(json.dumps(stated | {"architectures": ["Qwen2ForCausalLM"]}))
    (tmp_path / "model.safetensors").touch()
    model = ModelSection(name=str(tmp_path), served_name="tiny", max_model_len=configured)
    served = ServedModel(router_settings(ClusterConfig(model=model)))
    assert served.context == (configured or 2048)
    served.close()
