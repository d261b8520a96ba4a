"""One router as a Ray Serve deployment: it listens itself and follows the directory."""

from __future__ import annotations

import os
from dataclasses import replace

import ray

from cluster.config.schema import ClusterConfig
from cluster.gc_tuning import freeze_heap
from cluster.membership.directory_client import DirectoryClient
from cluster.membership.table import Pool, Replica, View, reachable
from cluster.models.store import find_model
from cluster.serve.admin import ClusterAdmin, Scale
from engine.model.families import load_model_config
from observability import metrics
from observability.logging import configure_logging
from protocol.ids import new_epoch
from protocol.states import WorkerState
from router.config import RouterConfig
from router.server import Router


def router_settings(config: ClusterConfig) -> RouterConfig:
    """The routers' settings. Where no context is configured it is the model's, which the scaling of
    its rotation may extend beyond what its file states."""
    path = find_model(config.model.name)
    settings = config.router_config(path)
    if settings.max_model_len is not None:
        return settings
    return replace(settings, max_model_len=load_model_config(path).max_position_embeddings)


class RouterReplica:
    """Serve creates one per replica and calls `__del__` before the process ends."""

    async def __init__(  # type: ignore[misc]
        self, config: ClusterConfig, revision: str, scale: Scale
    ) -> None:
        configure_logging()
        self._revision = revision
        # Text threads tokenise one prompt each; the tokenizer's own threads would only add load.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._state = WorkerState.STARTING
        self._epoch = new_epoch()
        self._membership = DirectoryClient(
            config.lifecycle,
            describe=self._describe,
            load=lambda: self._router.load,
            on_view=self._take_view,
            at_once=True,
        )
        directory = self._membership.directory
        secret = await directory.secret.remote()
        self._router = Router(
            router_settings(config),
            secret=secret,
            admin=ClusterAdmin(directory, secret=secret, scale=scale),
        )
        network = config.network
        await self._router.start(
            http_host=network.host,
            http_port=network.http_port,
            grpc_host=network.host,
            grpc_port=network.grpc_port,
            metrics_port=network.metrics_port,
            metrics_ports=network.worker_ports,
        )
        freeze_heap()
        self._membership.start()

    async def check_health(self) -> None:
        """Raise when the router no longer follows the cluster."""
        self._membership.check_health()

    async def __del__(self) -> None:
        """Graceful shutdown: announce draining, finish running requests, leave, stop."""
        self._state = WorkerState.DRAINING
        await self._membership.report()
        await self._router.retire()
        await self._membership.leave()
        await self._router.stop()

    def _take_view(self, view: View) -> None:
        self._router.set_workers(view.ready_workers())
        routers = view.of(Pool.ROUTER, WorkerState.STARTING, WorkerState.READY)
        responses = {router.name: router.address for router in routers}
        self._router.set_routers([router.metrics for router in routers], responses)
        self._router.set_sizes(view.sizes)

    def _describe(self) -> Replica:
        """READY once the router would accept a request."""
        if self._state is WorkerState.STARTING and self._router.ready:
            self._state = WorkerState.READY
            self._router.warm_up()
        self._router.metrics.set(metrics.DIRECTORY_SILENCE, self._membership.silence_s)
        addresses = self._router.addresses
        node = str(ray.util.get_node_ip_address())
        return Replica(
            name=self._router.router_id,
            epoch=self._epoch,
            pool=Pool.ROUTER,
            state=self._state,
            node=node,
            address=reachable(addresses.responses, node),
            http=addresses.http,
            grpc=addresses.grpc,
            metrics=reachable(addresses.metrics, node),
            revision=self._revision,
        )
