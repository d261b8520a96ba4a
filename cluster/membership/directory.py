"""The directory: one Ray actor that holds the cluster's replicas, configuration and secret.

Replicas report themselves about once a second and follow `watch`, a long poll. Ray restarts the
actor when it dies: it comes back empty, with a new incarnation, and fills up with the next reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import ray

from cluster.call_timeout import ANSWER_S, call_with_timeout
from cluster.config.schema import ClusterConfig
from cluster.membership.table import BoundedClock, Replica, ReplicaTable, View
from protocol.ids import new_epoch

NAMESPACE = "baton"
HEAD_NODE_RESOURCE = "node:__internal_head__"
NAME = "directory"
#: Expiry checks per `expiry_s`.
_CHECKS = 4


class Directory:
    """The actor's class; every method runs on its event loop."""

    def __init__(self, *, secret: bytes, config: ClusterConfig) -> None:
        self._secret = secret
        self._config = config
        expiry_s = config.lifecycle.expiry_s
        self._table = ReplicaTable(incarnation=new_epoch(), expiry_s=expiry_s)
        self._clock = BoundedClock(max_step_s=expiry_s / _CHECKS)
        self._changed = asyncio.Event()

    async def secret(self) -> bytes:
        return self._secret

    async def config(self) -> ClusterConfig:
        return self._config

    async def report(self, replica: Replica) -> None:
        """A replica's description of itself; also its heartbeat."""
        if self._table.report(replica, self._now()):
            self._announce()

    async def leave(self, name: str, epoch: int) -> None:
        if self._table.leave(name, epoch):
            self._announce()

    async def view(self) -> View:
        if self._table.expire(self._now()):
            self._announce()
        return self._table.view()

    async def watch(self, incarnation: int, version: int, timeout_s: float) -> View:
        """The replicas, once their version differs from the one given, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = await self.view()
            left = deadline - time.monotonic()
            if (view.incarnation, view.version) != (incarnation, version) or left <= 0:
                return view
            expiry = self._table.next_expiry(self._now()) + 0.01
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, expiry, self._clock.max_step_s)):
                    await self._changed.wait()

    def _now(self) -> float:
        return self._clock.time(time.monotonic())

    def _announce(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def create_directory(config: ClusterConfig) -> None:
    """Start the directory of this Ray cluster, with a new secret, unless it runs already. Raises
    Unavailable when Ray does not answer."""
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
    call_with_timeout(
        ANSWER_S,
        "Ray did not start the directory",
        lambda: actor.remote(secret=secrets.token_bytes(32), config=config),
    )


def find_directory() -> Any:
    """The handle of the directory. Raises ValueError when none runs, Unavailable when Ray does not
    answer."""
    return call_with_timeout(
        ANSWER_S,
        "Ray did not find the directory",
        lambda: ray.get_actor(NAME, namespace=NAMESPACE),
    )
