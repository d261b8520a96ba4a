"""The directory: one Ray actor that holds the cluster's replicas, configuration and secret.

Replicas report themselves about once a second and are answered what has changed; routers follow it
with a long poll. Ray restarts the actor when it dies: it comes back empty, with a new incarnation,
and fills up with the next reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import ray

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.config.schema import ClusterConfig
from cluster.gc_tuning import freeze_heap
from cluster.membership.store import ClusterStore
from cluster.membership.table import (
    BoundedClock,
    Pool,
    Replica,
    ReplicaTable,
    View,
    ViewChange,
    cluster_protocol,
)
from cluster.scaling.autoscaler import (
    Autoscaler,
    PoolBackend,
    PoolScaling,
    Reported,
    RoleState,
    make_autoscaler,
)
from protocol.errors import InvalidRequest
from protocol.ids import Role, new_epoch
from protocol.loads import RouterLoad
from protocol.messages import WorkerLoad
from protocol.states import WorkerState
from router.admin import PoolSize
from router.fingerprint import baton_build

NAMESPACE = "baton"
HEAD_NODE_RESOURCE = "node:__internal_head__"
NAME = "directory"
_START_S = 60.0
#: Expiry checks per `expiry_s`.
_CHECKS = 4
#: Followers that are told of a change before anything else is done.
_WOKEN_AT_ONCE = 64
#: From configuration, secret and the way to the present view.
MakeBackend = Callable[[ClusterConfig, bytes, Callable[[], View]], PoolBackend]
Recall = Callable[[bytes], ClusterConfig | None]
_CONFIG = "config"


class Directory:
    """The actor's class; every method runs on its event loop."""

    def __init__(
        self,
        *,
        secret: bytes,
        config: ClusterConfig,
        make_backend: MakeBackend | None = None,
        recall: Recall | None = None,
        own_process: bool = False,
    ) -> None:
        """make_backend: how autoscaled pools are changed; None: they are not. recall: the latest
        configuration, if it has changed since the directory was created. own_process: nothing else
        runs in it, so its garbage collection is tuned."""
        self._secret = secret
        self._build = baton_build(), cluster_protocol()
        if recall is not None:  # after a change, Ray still starts it with the first configuration
            config = recall(secret) or config
        self._config = config
        expiry_s = config.lifecycle.expiry_s
        self._table = ReplicaTable(incarnation=new_epoch(), expiry_s=expiry_s)
        self._clock = BoundedClock(max_step_s=expiry_s / _CHECKS)
        self._waiting: dict[asyncio.Future[None], None] = {}  # for a change
        self._told: deque[asyncio.Future[None]] = deque()  # of one, and not woken yet
        self._loads: dict[str, WorkerLoad | RouterLoad] = {}
        self._autoscaler: Autoscaler | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if make_backend is not None and (config.autoscaled or config.scaling.roles):
            backend = make_backend(config, secret, self._table.view)
            self._autoscaler = make_autoscaler(
                config, backend, self._reported, on_change=self._resize
            )
        if own_process:
            freeze_heap()

    async def secret(self) -> bytes:
        return self._secret

    async def config(self) -> ClusterConfig:
        return self._config

    async def build(self) -> tuple[str, str]:
        """Baton's build, and the digest of its messages."""
        return self._build

    async def report(
        self,
        replica: Replica,
        load: WorkerLoad | RouterLoad | None = None,
        known: tuple[int, int] | None = None,
    ) -> View | ViewChange | None:
        """A replica's description of itself and what it has to do; also its heartbeat. Returns what
        has changed since the incarnation and version that it knows."""
        if load is not None:
            self._loads[replica.name] = load
        if self._table.report(replica, self._now()):
            self._announce()
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._keep_expiring(), name="expiry"))
            if self._autoscaler is not None:
                task = asyncio.create_task(self._autoscaler.run(), name="autoscaler")
                self._tasks.append(task)
        return None if known is None else self._news(*known)

    async def leave(self, name: str, epoch: int) -> None:
        if self._table.leave(name, epoch):
            self._announce()

    async def view(self) -> View:
        self._expire()
        return self._table.view()

    async def watch(self, incarnation: int, version: int, timeout_s: float) -> View:
        """The replicas, once their version differs from the one given, or after `timeout_s`."""
        await self._await_change(incarnation, version, timeout_s)
        return self._table.view()

    async def follow(self, incarnation: int, version: int, timeout_s: float) -> View | ViewChange:
        """As `watch`, but only what has changed, if the directory still knows."""
        await self._await_change(incarnation, version, timeout_s)
        return self._news(incarnation, version)

    def _news(self, incarnation: int, version: int) -> View | ViewChange:
        return self._table.change(incarnation, version) or self._table.view()

    async def _await_change(self, incarnation: int, version: int, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._table.is_at(incarnation, version):
                    change = asyncio.get_running_loop().create_future()
                    self._waiting[change] = None
                    try:
                        await change
                    finally:
                        self._waiting.pop(change, None)

    async def _keep_expiring(self) -> None:
        """One task for all that watch."""
        while True:
            self._expire()
            next_s = self._table.next_expiry(self._now()) + 0.01
            await asyncio.sleep(min(next_s, self._clock.max_step_s))

    def _expire(self) -> None:
        if self._table.expire(self._now()):
            self._announce()

    async def scaling(self) -> tuple[PoolScaling, ...]:
        """How autoscaled pools are scaled, and why."""
        return () if self._autoscaler is None else self._autoscaler.scaling()

    async def roles(self) -> RoleState | None:
        """How workers' roles follow the load, and why; None where they do not."""
        return None if self._autoscaler is None else self._autoscaler.roles(time.monotonic())

    async def pin(self, roles: Collection[Role], pinned: bool) -> frozenset[Role]:
        """Leave autoscaled pools to an operator, or take them back; those that this changed. Other
        pools are as if pinned: InvalidRequest when they are to be automatic."""
        fixed = [role for role in roles if role not in self._config.autoscaled]
        if fixed and not pinned:
            name = f"{fixed[0]}.max_replicas"
            raise InvalidRequest(f"{name} is not set: the pool is not autoscaled", param=name)
        if self._autoscaler is None:
            return frozenset()
        return await self._autoscaler.pin(set(roles) - set(fixed), pinned=pinned)

    def _reported(self) -> list[Reported]:
        """The ready replicas with the loads that they reported last. Autoscaled pools consist of
        the workers that were started for them, whatever role those have now."""
        follow = self._config.scaling.roles
        ready = [r for r in self._table.view().replicas if r.state is WorkerState.READY]
        self._loads = {r.name: self._loads[r.name] for r in ready if r.name in self._loads}
        return [
            Reported(
                name=replica.name,
                epoch=replica.epoch,
                role=None if replica.pool is Pool.ROUTER else _role(replica, live=follow),
                load=self._loads[replica.name],
            )
            for replica in ready
            if replica.name in self._loads
        ]

    def _resize(self) -> None:
        assert self._autoscaler is not None
        self._table.resize(
            tuple(
                PoolSize(role=pool.role, wanted=pool.wanted, pinned=pool.pinned)
                for pool in self._autoscaler.scaling()
            )
        )
        self._announce()

    def _now(self) -> float:
        return self._clock.time(time.monotonic())

    def _announce(self) -> None:
        """Wake all that wait for a change: some at a time, so that reports pass between them."""
        waking = bool(self._told)
        self._told.extend(self._waiting)
        self._waiting.clear()
        if self._told and not waking:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(_WOKEN_AT_ONCE, len(self._told))):
            change = self._told.popleft()
            if not change.done():
                change.set_result(None)
        if self._told:
            asyncio.get_running_loop().call_soon(self._wake_some)


def _role(replica: Replica, *, live: bool) -> Role:
    """The role that a worker has now, or that of its pool."""
    return replica.ref().role if live else Role(replica.pool)


def create_directory(config: ClusterConfig, make_backend: MakeBackend) -> bytes:
    """Start the directory of this Ray cluster, with a new secret, unless it runs already; give it
    this configuration. Returns the secret. Raises Unavailable when Ray does not answer."""
    actor = ray.remote(Directory).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        # On the head node, so that an autoscaler can remove any worker node.
        resources={HEAD_NODE_RESOURCE: 0.001},
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=10_000,
    )

    def create() -> tuple[bytes, ClusterConfig]:
        directory = actor.remote(
            secret=secrets.token_bytes(32),
            config=config,
            make_backend=make_backend,
            recall=recall_config,
            own_process=True,
        )
        secret, known = ray.get([directory.secret.remote(), directory.config.remote()])
        return secret, known

    secret, known = call_with_timeout(_START_S, "Ray did not start the directory", create)
    if known != config:
        reconfigure(find_directory(), secret, config)
    return secret


def reconfigure(directory: Any, secret: bytes, config: ClusterConfig) -> None:
    """Give the directory another configuration: it starts again with it, on the code that is
    installed now, and fills up with the next reports. Raises Unavailable when Ray does not answer.
    """
    ClusterStore(secret).put(_CONFIG, pickle.dumps(config))
    call_with_timeout(
        ANSWER_S,
        "Ray did not restart the directory",
        lambda: ray.kill(directory, no_restart=False),
    )


def recall_config(secret: bytes) -> ClusterConfig | None:
    """The configuration of the latest `reconfigure`."""
    stored = ClusterStore(secret).get(_CONFIG)
    # Only processes that could run any code in this Ray cluster can write there.
    return None if stored is None else pickle.loads(stored)


def find_directory() -> Any:
    """The handle of the directory. Raises ValueError when none runs, Unavailable when Ray does not
    answer."""
    return call_with_timeout(
        ANSWER_S,
        "Ray did not find the directory",
        lambda: ray.get_actor(NAME, namespace=NAMESPACE),
    )
