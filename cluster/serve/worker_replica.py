"""One replica of a pool, as a Serve deployment class: builds the worker, reports it, drains it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.config.schema import AUTO, ClusterConfig
from cluster.membership.directory_client import Registration
from cluster.membership.table import Departures, Member, MemberKind
from cluster.models.store import find_model
from cluster.serve.follower_rank import on_own_gpu, start_followers
from cluster.serve.gc_tuning import settle_heap
from concurrency.threads import in_own_thread
from observability.logging import configure_logging, get_logger
from protocol.errors import Unavailable
from protocol.ids import Role
from protocol.states import WorkerState

if TYPE_CHECKING:  # they import torch
    from decode_worker.worker import DecodeWorker
    from prefill_worker.worker import PrefillWorker

log = get_logger(__name__)


def worker_host(config: ClusterConfig) -> str:
    """The address that this node's workers bind and advertise."""
    host = config.network.worker_host
    return str(ray.util.get_node_ip_address()) if host == AUTO else host


class WorkerReplica:
    """Serve creates one per replica and ends it with `__del__` before the process goes.

    The worker is reported to the directory only once it has run a real step; from then on about
    every heartbeat. `drain` of the control channel takes it off and lets Serve replace it.
    """

    async def __init__(self, role: Role, config: ClusterConfig) -> None:  # type: ignore[misc]
        configure_logging()
        self._config = config
        self._finished = False
        self._registration = Registration(config.lifecycle)
        began = time.monotonic()
        name = f"{role}-{serve.get_replica_context().replica_id.unique_id}"
        secret = await self._registration.directory.secret.remote()
        self._worker = await _build(role, config, name, secret)
        imported = time.monotonic()
        self._ref = await self._worker.start()
        spent = {
            "imports_s": round(imported - began, 2),
            "start_s": round(time.monotonic() - imported, 2),
        }
        log.info("worker ready", extra={"worker": name, **spent})
        settle_heap()
        await self._report()
        self._heart = asyncio.create_task(self._beat(), name="heartbeat")
        self._watch = asyncio.create_task(self._follow(), name="watch")

    async def check_health(self) -> None:
        """Raise when the worker is broken, hangs, or was drained on demand and is done."""
        self._worker.check_health()
        if self._finished:
            raise Unavailable("drained on demand: to be replaced")
        for task in (self._heart, self._watch):
            if task.done():
                raise Unavailable(f"the worker's {task.get_name()} ended")

    async def __del__(self) -> None:
        """Leave: tell the directory, finish what runs, end. Until then it goes on reporting: who is
        taken off for its silence loses its hand-offs."""
        draining = asyncio.ensure_future(self._worker.drain(self._config.lifecycle.drain_s))
        await asyncio.sleep(0)  # let it refuse new work before routers hear of it
        await self._report()
        if not await draining:
            log.warning("drain ran out of time", extra={"worker": self._ref.worker_id})
        self._heart.cancel()
        self._watch.cancel()
        await self._registration.leave(self._member(WorkerState.DRAINING))
        await self._worker.stop()

    async def _beat(self) -> None:
        draining: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(self._config.lifecycle.heartbeat_s)
            await self._report()
            if draining is None and self._worker.status().state is WorkerState.DRAINING:
                draining = asyncio.create_task(self._finish())

    async def _follow(self) -> None:
        """Tell the worker who is there, and whose hand-offs can be given up."""
        departures = Departures(grace_s=self._config.lifecycle.expiry_s)
        async for view in self._registration.views():
            self._worker.peers_left(departures.take(view, time.monotonic()))
            self._worker.peers_joined(view.ready_workers())

    async def _finish(self) -> None:
        """Drained on demand: wait for the last request, then let Serve replace this replica."""
        try:
            await self._worker.drain(self._config.lifecycle.drain_s)
        finally:
            self._finished = True

    async def _report(self) -> None:
        await self._registration.report(self._member(self._worker.status().state))

    def _member(self, state: WorkerState) -> Member:
        return Member(
            name=self._ref.worker_id,
            epoch=self._ref.epoch,
            kind=MemberKind(self._ref.role),
            state=state,
            node=str(ray.util.get_node_ip_address()),
            address=self._ref.address,
        )


async def _build(
    role: Role, config: ClusterConfig, name: str, secret: bytes
) -> PrefillWorker | DecodeWorker:
    """The worker and, for tensor parallelism, its followers. Followers start first: their processes
    and imports take as long as ours."""
    pool = config.pool(role)
    followers = start_followers(config, pool)
    await in_own_thread(_import_worker)
    from decode_worker.worker import DecodeWorker
    from engine.ranks.group import RankGroup
    from prefill_worker.worker import PrefillWorker
    from worker_runtime.worker import WorkerSettings

    host = worker_host(config)
    settings = WorkerSettings(
        worker_id=name,
        engine=on_own_gpu(config.engine_config(role, find_model(config.model.name))),
        worker=config.worker_config(role, host),
        transfer=config.transfer_config(host),
        secret=secret,
    )
    group = RankGroup(pool.engine.tp_size, host=host, timeout_s=120.0) if followers else None
    for rank, follower in enumerate(followers, start=1):
        assert group is not None
        follower.run.remote(group.invite, rank, settings.engine, settings.transfer)
    if role is Role.PREFILL:
        return PrefillWorker(settings, group=group)
    return DecodeWorker(settings, group=group)


def _import_worker() -> None:
    """Read the modules that a worker is made of, which takes seconds of computing."""
    import decode_worker.worker  # noqa: F401
    import prefill_worker.worker  # noqa: F401
