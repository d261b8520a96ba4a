"""One worker as a Ray Serve deployment: builds the worker, reports it, drains it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.config.schema import AUTO, ClusterConfig
from cluster.gc_tuning import freeze_heap
from cluster.membership.directory_client import DirectoryClient
from cluster.membership.table import Pool, Replica, View
from cluster.models.store import find_model
from cluster.serve.follower_rank import on_own_gpu, start_followers
from concurrency.threads import run_in_thread
from observability.logging import configure_logging, get_logger
from protocol.errors import Unavailable
from protocol.ids import Role
from protocol.states import WorkerState

if TYPE_CHECKING:  # it imports torch
    from worker_runtime.worker import Worker

log = get_logger(__name__)

_RANKS_TIMEOUT_S = 120.0


class WorkerReplica:
    """Serve creates one per replica and calls `__del__` before the process ends.

    The worker is reported to the directory once it has run a real step, then at every heartbeat.
    After a drain command on the control channel the health check fails once the worker is idle, so
    that Serve replaces the replica.
    """

    async def __init__(  # type: ignore[misc]
        self, role: Role, config: ClusterConfig, revision: str
    ) -> None:
        configure_logging()
        self._revision = revision
        self._drain_s = config.lifecycle.drain_s
        self._draining: asyncio.Future[bool] | None = None
        self._peer_epochs = frozenset[int]()
        self._membership = DirectoryClient(
            config.lifecycle,
            describe=self._describe,
            load=lambda: self._worker.status().load,
            on_view=self._take_view,
        )
        start = time.monotonic()
        name = f"{role}-{serve.get_replica_context().replica_id.unique_id}"
        secret = await self._membership.directory.secret.remote()
        self._worker = await _build(role, config, name, secret)
        built = time.monotonic()
        self._ref = await self._worker.start()
        durations = {
            "imports_s": round(built - start, 2),
            "start_s": round(time.monotonic() - built, 2),
        }
        log.info("worker ready", extra={"worker": name, **durations})
        freeze_heap()
        self._membership.start()

    async def check_health(self) -> None:
        """Raise when the worker is broken, hangs, or has finished a requested drain."""
        self._worker.check_health()
        if self._draining is not None and self._draining.done():
            raise Unavailable("drained on request: to be replaced")
        self._membership.check_health()

    async def __del__(self) -> None:
        """Graceful shutdown: announce draining, finish running requests, leave, stop. Heartbeats
        continue meanwhile; peers abort the KV transfers of an expired worker."""
        drained = self._draining = asyncio.ensure_future(self._worker.drain(self._drain_s))
        await asyncio.sleep(0)  # the worker refuses new requests before routers are told
        await self._membership.report()
        if not await drained:
            log.warning("drain ran out of time", extra={"worker": self._ref.worker_id})
        await self._membership.leave()
        await self._worker.stop()

    def _take_view(self, view: View) -> None:
        """Tell the worker its peers, and the peers whose transfers cannot complete any more."""
        epochs = frozenset(worker.epoch for worker in view.workers())
        self._worker.peers_left(self._peer_epochs - epochs)
        self._peer_epochs = epochs
        self._worker.peers_joined(view.ready_workers())

    def _describe(self) -> Replica:
        """The worker as it is; completes a drain that the control channel has begun."""
        state = self._worker.status().state
        if state is WorkerState.DRAINING and self._draining is None:
            self._draining = asyncio.ensure_future(self._worker.drain(self._drain_s))
        return Replica(
            name=self._ref.worker_id,
            epoch=self._ref.epoch,
            pool=Pool(self._ref.role),
            role=self._worker.status().role,
            state=state,
            node=str(ray.util.get_node_ip_address()),
            address=self._ref.address,
            process=self._ref.process,
            revision=self._revision,
        )


async def _build(role: Role, config: ClusterConfig, name: str, secret: bytes) -> Worker:
    """The worker and its tensor-parallel followers. Followers start first: their processes and
    imports take as long as this one's."""
    pool = config.pool(role)
    followers = start_followers(pool)
    await run_in_thread(_import_worker)
    from decode_worker.scheduler import DecodeScheduler
    from engine.ranks.group import RankGroup
    from prefill_worker.scheduler import PrefillScheduler
    from worker_runtime.worker import Worker, WorkerSettings

    host = config.network.worker_host
    if host == AUTO:
        host = str(ray.util.get_node_ip_address())
    (other,) = (each for each in Role if each is not role)
    settings = WorkerSettings(
        worker_id=name,
        role=role,
        schedulers={Role.PREFILL: PrefillScheduler, Role.DECODE: DecodeScheduler},
        engine=on_own_gpu(config.engine_config(role, find_model(config.model_name(role)))),
        worker=config.worker_config(role, host),
        other=config.worker_config(other, host, home=role),
        transfer=config.transfer_config(host),
        tiers=pool.tiers,
        secret=secret,
    )
    group = None
    if followers:
        group = RankGroup(pool.engine.tp_size, timeout_s=_RANKS_TIMEOUT_S)  # all on this machine
        for rank, follower in enumerate(followers, start=1):
            follower.run.remote(
                group.invite, rank, settings.engine, settings.transfer, settings.tiers
            )
    return Worker(settings, group=group)


def _import_worker() -> None:
    """Import the worker's modules, which takes seconds."""
    import worker_runtime.worker  # noqa: F401
