"""Stub workers and routers that report to a real directory, in a local Ray: how soon routers and
workers know of one that joins or leaves, and how long the directory's event loop is held."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import ray

from cluster.config.load import find_config, load_config
from cluster.config.schema import ClusterConfig
from cluster.membership.directory import HEAD_NODE_RESOURCE, NAME, NAMESPACE, Directory
from cluster.membership.directory_client import DirectoryClient
from cluster.membership.table import Pool, Replica, View, ViewChange
from protocol.messages import WorkerLoad
from protocol.states import WorkerState

_PROBE_S = 0.002
_CHANGES = 10
ROUTERS = 8
NEW = "-new-"
PROCESSES = 4


class ProbedDirectory(Directory):
    """Notes for how long its loop runs other things, in seconds of CPU: what else runs on the
    machine does not count."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held_s: list[float] = []
        self._probe: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self._held_s.clear()
        if self._probe is None:
            self._probe = asyncio.create_task(self._look())

    async def held(self) -> list[float]:
        return sorted(self._held_s, reverse=True)[:50]

    async def busy(self) -> float:
        return time.process_time()

    async def _look(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(_PROBE_S)
            now = time.thread_time()
            self._held_s.append(now - last)
            last = now


class Stub(DirectoryClient):
    """Reports as a worker or router does. It has the numbers that follow the workers' if it is a
    router, and remembers when it learned of each change."""

    def __init__(self, config: ClusterConfig, number: int, num_workers: int) -> None:
        self.number = number
        self.pool = Pool.ROUTER if number >= num_workers else tuple(Pool)[1 + number % 2]
        self.seen: dict[str, float] = {}
        self.names: frozenset[str] = frozenset()
        super().__init__(
            config.lifecycle,
            describe=self.describe,
            load=WorkerLoad,
            on_view=self._see,
            at_once=self.pool is Pool.ROUTER,
        )

    def describe(self) -> Replica:
        return Replica(
            name=f"{self.pool}-{self.number}",
            epoch=1 + self.number,
            pool=self.pool,
            state=WorkerState.READY,
            node="10.0.0.1",
            address=f"10.0.0.1:{10_000 + self.number}",
            process=f"{self.number:032x}",
        )

    def _take(self, found: View | ViewChange) -> None:
        """A worker notes only what is new: a thousand that each put together a view of a thousand
        would occupy this machine, while theirs do that in three milliseconds each."""
        if self.pool is Pool.ROUTER:
            super()._take(found)
            return
        new = frozenset(replica.name for replica in found.replicas)
        if isinstance(found, ViewChange):
            self._note("-", frozenset(found.gone))
        self._note("+", new)
        self._known = View(incarnation=found.incarnation, version=found.version)

    def _see(self, view: View) -> None:
        names = frozenset(replica.name for replica in view.replicas)
        self._note("-", self.names - names)
        self._note("+", names - self.names)
        self.names = names

    def _note(self, sign: str, names: frozenset[str]) -> None:
        now = time.monotonic()
        self.seen |= {f"{sign}{name}": now for name in names if NEW in name}


def members(address: str, numbers: range, num_workers: int, pipe: Connection) -> None:
    """A process with some of the stubs: says `ready` once its routers know all and its workers have
    heard of something, then answers when its last worker and its last router saw each change that
    it is asked for."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    asyncio.run(_report(numbers, num_workers, pipe))


async def _report(numbers: range, num_workers: int, pipe: Connection) -> None:
    config = load_config(find_config("local-cpu")).config
    stubs = [Stub(config, number, num_workers) for number in numbers]
    workers = [stub for stub in stubs if stub.pool is not Pool.ROUTER]
    routers = [stub for stub in stubs if stub.pool is Pool.ROUTER]
    for stub in stubs:
        stub.start()
        await asyncio.sleep(0.005)
    while (  # noqa: ASYNC110
        min(len(stub.names) for stub in routers) < num_workers + ROUTERS
        or min(stub._known.version for stub in workers) < 0
    ):
        await asyncio.sleep(0.1)
    pipe.send("ready")
    while (change := await asyncio.to_thread(pipe.recv)) is not None:
        while not all(change in stub.seen for stub in stubs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pipe.send([max(stub.seen[change] for stub in group) for group in (workers, routers)])


def measure(num_workers: int) -> dict[str, str]:
    """The figures, as texts."""
    config = load_config(find_config("local-cpu")).config
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        context = ray.init(
            num_cpus=1,
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            object_store_memory=80_000_000,
        )
        try:
            actor = ray.remote(ProbedDirectory).options(
                name=NAME,
                num_cpus=0,
                resources={HEAD_NODE_RESOURCE: 0.001},
                max_concurrency=10_000,
            )
            directory = actor.remote(secret=b"s" * 32, config=config, own_process=True)
            return _measure(directory, context.address_info["address"], num_workers)
        finally:
            ray.shutdown()


def _measure(directory: Any, address: str, num_workers: int) -> dict[str, str]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for part in range(PROCESSES):
        own, other = spawn.Pipe()
        numbers = range(part, num_workers + ROUTERS, PROCESSES)
        process = spawn.Process(
            target=members, args=(address, numbers, num_workers, other), daemon=True
        )
        process.start()
        pipes.append(own)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        return _changes(directory, pipes, num_workers)
    finally:
        for process in processes:
            process.kill()


def _changes(directory: Any, pipes: list[Connection], num_workers: int) -> dict[str, str]:
    newcomers = _newcomers(num_workers)
    ray.get(directory.begin.remote())
    busy, start = ray.get(directory.busy.remote()), time.monotonic()
    known: dict[str, list[list[float]]] = {"joins": [], "leaves": []}
    for one in newcomers:
        for kind, sign in (("joins", "+"), ("leaves", "-")):
            began = time.monotonic()
            if kind == "joins":
                ray.get(directory.report.remote(one, WorkerLoad()))
            else:
                ray.get(directory.leave.remote(one.name, one.epoch))
            for pipe in pipes:
                pipe.send(f"{sign}{one.name}")
            seen = [pipe.recv() for pipe in pipes]
            known[kind].append([max(group) - began for group in zip(*seen, strict=True)])
            time.sleep(0.5)
    took = time.monotonic() - start
    held = ray.get(directory.held.remote())
    busy = ray.get(directory.busy.remote()) - busy
    found = {
        f"all {group} know of one that {kind}, slowest of {_CHANGES}": f"{1000 * max(took):.0f} ms"
        for kind, rows in known.items()
        for group, took in zip(("workers", "routers"), zip(*rows, strict=True), strict=True)
    }
    return found | {
        "longest hold of the directory's loop, CPU": f"{1000 * held[0]:.0f} ms",
        "10th longest": f"{1000 * held[9]:.0f} ms",
        "the directory's CPU, of one core": f"{100 * busy / took:.0f} %",
    }


def _newcomers(num_workers: int) -> list[Replica]:
    return [
        Replica(
            name=f"decode{NEW}{n}",
            epoch=num_workers + ROUTERS + 2 + n,
            pool=Pool.DECODE,
            state=WorkerState.READY,
            address="10.0.0.2:1",
        )
        for n in range(_CHANGES)
    ]
