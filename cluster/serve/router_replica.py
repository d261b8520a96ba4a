"""One router, as a Serve deployment class: it listens itself and follows the directory."""

from __future__ import annotations

import asyncio
import os
import time

import ray

from cluster.config.schema import ClusterConfig
from cluster.membership.directory_client import Registration
from cluster.membership.table import Following, Member, MemberKind, reachable
from cluster.models.store import find_model
from cluster.serve.admin import ClusterAdmin, Scale
from cluster.serve.gc_tuning import settle_heap
from observability.logging import configure_logging
from protocol.errors import Unavailable
from protocol.ids import new_epoch
from protocol.states import WorkerState
from router.server import Router

_STARTING_S = 0.2


class RouterReplica:
    """Serve creates one per replica and ends it with `__del__` before the process goes."""

    async def __init__(self, config: ClusterConfig, scale: Scale) -> None:  # type: ignore[misc]
        configure_logging()
        # One text at a time, in threads of ours: the tokenizer's own would only take cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._config = config
        self._registration = Registration(config.lifecycle)
        self._state = WorkerState.STARTING
        self._epoch = new_epoch()
        self._following = Following(grace_s=config.lifecycle.expiry_s)
        directory = self._registration.directory
        secret = await directory.secret.remote()
        self._router = Router(
            config.router_config(find_model(config.model.name)),
            secret=secret,
            admin=ClusterAdmin(directory, config, secret=secret, scale=scale),
        )
        network = config.network
        await self._router.start(
            http_host=network.host,
            http_port=network.http_port,
            grpc_host=network.host,
            grpc_port=network.grpc_port,
            metrics_port=network.metrics_port,
        )
        settle_heap()
        self._watch = asyncio.create_task(self._follow(), name="watch")
        self._heart = asyncio.create_task(self._beat(), name="heartbeat")

    async def check_health(self) -> None:
        """Raise when the router no longer follows the cluster."""
        for task in (self._watch, self._heart):
            if task.done():
                raise Unavailable(f"the router's {task.get_name()} ended")

    async def __del__(self) -> None:
        """Leave: stop listening, finish what runs, end; known as a member until then."""
        self._state = WorkerState.DRAINING
        await self._registration.report(self._member())
        await self._router.retire()
        self._heart.cancel()
        self._watch.cancel()
        await self._router.stop()
        await self._registration.leave(self._member())

    async def _follow(self) -> None:
        async for view in self._registration.views():
            self._router.set_workers(self._following.take(view, time.monotonic()))
            routers = view.of(MemberKind.ROUTER, WorkerState.STARTING, WorkerState.READY)
            self._router.set_routers([member.metrics for member in routers])

    async def _beat(self) -> None:
        """Report; as READY from when a request would be accepted."""
        while True:
            if self._state is WorkerState.STARTING and self._router.ready:
                self._state = WorkerState.READY
                self._router.warm_up()
            await self._registration.report(self._member())
            starting = self._state is WorkerState.STARTING
            await asyncio.sleep(_STARTING_S if starting else self._config.lifecycle.heartbeat_s)

    def _member(self) -> Member:
        addresses = self._router.addresses
        node = str(ray.util.get_node_ip_address())
        return Member(
            name=self._router.router_id,
            epoch=self._epoch,
            kind=MemberKind.ROUTER,
            state=self._state,
            node=node,
            http=addresses.http,
            grpc=addresses.grpc,
            metrics=reachable(addresses.metrics, node),
        )
