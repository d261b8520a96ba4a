"""One router: both front ends, the workers it follows, and everything between."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.types import ASGIApp

from observability import metrics
from observability.clock import steady_clock
from observability.export import MetricSet
from observability.logging import get_logger
from protocol.ids import Role, WorkerRef
from protocol.loads import RouterLoad
from router.admin import AdminBackend, ClusterInfo, PoolInfo, PoolSize, RouterInfo, WorkerInfo
from router.auth.keys import KeyFile
from router.auth.tls import Tls
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.telemetry import make_tracing
from router.grpc.admin import AdminServicer
from router.grpc.inference import InferenceServicer
from router.grpc.server import GrpcServer
from router.openai.app import make_app, make_metrics_app
from router.openai.server import HttpServer
from router.responses.shared import SharedResponses
from router.responses.store import ResponseStore
from router.served_model import ServedModel
from router.service import InferenceService
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

if TYPE_CHECKING:
    from observability.tracing import Tracing

log = get_logger(__name__)

_HEALTH_CHECK_S = 5.0
_FILE_CHECK_S = 1.0
_BALANCE_S = 1.0
#: Files of a router beside its clients' connections: workers, libraries, logs.
_OTHER_FILES = 512
#: After the limit, for the error to reach clients that are cut off.
_ERROR_FLUSH_S = 1.0
#: For idle HTTP connections of a retiring router: a client may be sending its next request.
_IDLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddresses:
    """Where the front ends listen, this router alone answers /metrics, and other routers ask for
    the responses that it stored, as `host:port`."""

    http: str
    grpc: str
    metrics: str
    responses: str


class Router:
    """The router of one process, on one event loop.

    The owner calls `start` once, `set_workers` whenever the set of ready workers changes, and at
    the end `retire` and `stop`. Construction reads the model's folder and may take a second.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        secret: bytes,
        admin: AdminBackend | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.router_id = f"router-{uuid4().hex[:12]}"
        self.metrics = MetricSet(model_name=config.model_name, vllm_names=config.vllm_metric_names)
        self.addresses = RouterAddresses(http="", grpc="", metrics="", responses="")
        self._max_connections = fit_connections(config.max_connections)
        self._access = KeyFile(config.api_keys_file, tiers=frozenset(config.service_tiers))
        self._tls = Tls(config.tls)
        self._tracing = tracing or make_tracing(config.otlp_endpoint, self.router_id)
        self._model = ServedModel(config)
        self._workers = WorkerSet(router_id=self.router_id, secret=secret, config=config)
        dispatcher = Dispatcher(
            router_id=self.router_id,
            workers=self._workers,
            secret=secret,
            config=config,
            metric_set=self.metrics,
            clock=steady_clock(),
            rng=random.Random(),
        )
        self._service = InferenceService(self._model, dispatcher, tracing=self._tracing)
        store = ResponseStore(
            max_bytes=config.response_store_bytes,
            keep_s=config.response_store_s,
            clock=time.monotonic,
        )
        self._responses = SharedResponses(self.router_id, store, secret=secret)
        app = make_app(
            self._service,
            config=config,
            access=self._access,
            metrics_text=self.metrics_text,
            model=self._model,
            metrics_targets=lambda: self._targets or (self.addresses.metrics,),
            responses=self._responses,
        )
        self._http = self._listener(app)
        scrapes = make_metrics_app(self.metrics_text, config=config, access=self._access)
        self._scrapes = self._listener(scrapes)
        self._grpc = GrpcServer(
            InferenceServicer(self._service),
            AdminServicer(self.view, admin) if config.admin_enabled else None,
            access=self._access,
            credentials=self._tls.grpc_credentials(),
            config=replace(config, max_connections=self._max_connections),
        )
        self._page: asyncio.Future[bytes] | None = None
        self._targets, self._retiring = tuple[str, ...](), False
        self._tasks: list[asyncio.Task[None]] = []

    def _listener(self, app: ASGIApp) -> HttpServer:
        return HttpServer(
            app,
            tls=self._tls.context,
            keep_alive_s=self.config.keep_alive_s,
            max_connections=self._max_connections,
            on_refusal=lambda: self.metrics.count(metrics.REFUSALS, reason="connections"),
            reuse_port=self.config.reuse_port,
        )

    # --- life -------------------------------------------------------------------------------------

    async def start(
        self,
        *,
        http_host: str,
        http_port: int,
        grpc_host: str,
        grpc_port: int,
        metrics_port: int = 0,
        metrics_ports: str = "",
    ) -> RouterAddresses:
        """Listen for HTTP, gRPC and scrapes (port 0: any free one; of scrapes, one
        of the range `metrics_ports`). Ready with the first worker.

        Raises Unavailable, naming http_port, grpc_port or metrics_port, when a port is taken.
        """
        try:
            http = await self._http.start(http_host, http_port, "http_port")
            grpc = await self._grpc.start(grpc_host, grpc_port)
            # Shared while one router takes over from another.
            scrapes = await self._scrapes.start(
                http_host, metrics_port, "metrics_port", metrics_ports
            )
            responses = await self._responses.start(http_host)
        except BaseException:
            await self.stop()
            raise
        self.addresses = RouterAddresses(http=http, grpc=grpc, metrics=scrapes, responses=responses)
        self._tasks = [
            asyncio.create_task(self._keep_health()),
            asyncio.create_task(self._keep_files()),
            asyncio.create_task(self._keep_balance()),
        ]
        log.info("router started", extra={"http": http, "grpc": grpc, "router": self.router_id})
        return self.addresses

    async def retire(self, timeout_s: float | None = None) -> bool:
        """Stop listening and wait for the requests in flight. Returns whether all ended within
        `timeout_s` (the configured time if None).

        Other routers on the same port take the new connections; open ones are told to reconnect
        (GOAWAY, or closed after their answer). `stop` still has to follow.
        """
        limit = self.config.drain_s if timeout_s is None else timeout_s
        self._retiring = True
        cut_s = limit + _ERROR_FLUSH_S
        closing = asyncio.gather(
            self._grpc.stop(cut_s),
            self._http.stop(cut_s, _IDLE_S),
            self._service.background.done(),
        )
        # Not until nothing is in flight: a request may still be on its way in.
        await asyncio.wait({closing}, timeout=limit)
        ended = not self.num_requests
        self._service.limits.close()
        await closing
        return ended

    async def stop(self) -> None:
        """Close both front ends and every stream; requests in flight fail. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._service.limits.close()
        await asyncio.gather(self._grpc.stop(), self._http.stop(), self._scrapes.stop())
        await self._service.background.done()
        await self._responses.stop()
        await self._workers.close()
        self._model.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # --- the cluster ------------------------------------------------------------------------------

    def set_workers(self, refs: Sequence[WorkerRef]) -> None:
        """Serve from exactly these workers: new ones take requests once their event stream is up,
        others finish what they have. Call on the router's event loop, after `start`."""
        self._workers.set(refs)

    def set_routers(self, targets: Sequence[str], responses: Mapping[str, str]) -> None:
        """Set the scrape addresses of all routers in the cluster, and where each of them, by its
        id, serves the responses that it stored; this one's included. Call like `set_workers`."""
        self._targets = tuple(targets)
        self._responses.set_peers(responses)
        self._service.share_limits(max(1, len(targets)))

    def warm_up(self) -> None:
        """Start the process that checks grammars, which takes a second: call when ready."""
        self._model.grammars.begin()

    @property
    def ready(self) -> bool:
        return self._service.ready

    @property
    def num_requests(self) -> int:
        return self._service.limits.in_flight

    @property
    def load(self) -> RouterLoad:
        """What waits here and what has come, for the sizes of the pools."""
        return self._service.load

    def set_sizes(self, sizes: Sequence[PoolSize]) -> None:
        """The sizes that autoscaled pools should have, for the metrics."""
        for size in sizes:
            self.metrics.set(metrics.POOL_WANTED, size.wanted, pool=size.role.value)
            self.metrics.set(metrics.POOL_PINNED, float(size.pinned), pool=size.role.value)

    def view(self) -> ClusterInfo:
        workers = self._workers.all()
        pools = tuple(
            PoolInfo(role=role, workers=tuple(_worker_info(w) for w in workers if w.role is role))
            for role in Role
        )
        own = RouterInfo(
            router_id=self.router_id,
            http_address=self.addresses.http,
            grpc_address=self.addresses.grpc,
            state=self._state(),
            requests=self.num_requests,
        )
        return ClusterInfo(model=self.config.model_name, pools=pools, routers=(own,))

    async def metrics_text(self) -> bytes:
        """The metrics of this router and of the workers it follows, in Prometheus' text format.
        Callers at the same time share one text, which is written in a thread."""
        if self._page is None or self._page.done():
            self._page = asyncio.ensure_future(self._write_metrics())
        return await asyncio.shield(self._page)

    async def _write_metrics(self) -> bytes:
        await self._workers.refresh()
        # The last status of a lost worker is outdated.
        known = {w.ref.worker_id: w.status for w in self._workers.all() if w.connected and w.status}
        self.metrics.workers.statuses = tuple(known.values())
        return await asyncio.to_thread(self.metrics.render)

    # --- parts ------------------------------------------------------------------------------------

    async def _keep_health(self) -> None:
        serving: bool | None = None
        while True:
            if self.ready is not serving:
                serving = self.ready
                await self._grpc.set_serving(serving)
                continue  # readiness may have changed meanwhile
            await self._workers.changed(_HEALTH_CHECK_S)

    async def _keep_balance(self) -> None:
        """Have sequences move to workers that have just begun to decode."""
        while True:
            await asyncio.sleep(_BALANCE_S)
            self._workers.balance(time.monotonic())

    async def _keep_files(self) -> None:
        """Reload keys and certificates when their files change."""
        while True:
            await asyncio.sleep(_FILE_CHECK_S)
            try:
                await self._access.refresh()
                await self._tls.refresh()
            except Exception:
                log.exception("reloading keys and certificates failed")

    def _state(self) -> str:
        if self._service.limits.draining or self._retiring:
            return "draining"
        return "ready" if self._service.ready else "waiting for workers"


def fit_connections(max_connections: int) -> int:
    """Raise this process's limit of open files to what so many connections of each front end need;
    the number of connections that fit. Without a file for a connection a listener could not even
    refuse it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    fitting = max(1, (needed - _OTHER_FILES) // 2)
    if fitting < max_connections:
        files = {"open_files": hard, "asked_for": max_connections, "connections": fitting}
        log.warning("the limit of open files allows fewer connections", extra=files)
    return fitting


def _worker_info(worker: WorkerClient) -> WorkerInfo:
    if not worker.connected:
        state = "lost" if worker.status is not None else "connecting"
    elif worker.leaving:
        state = "leaving"
    else:
        state = worker.state.value
    return WorkerInfo(
        ref=worker.ref, state=state, load=worker.load, in_flight=worker.reservations.in_flight
    )
