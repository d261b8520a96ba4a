"""One router: both front doors, the workers it knows, and everything between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.types import ASGIApp

from observability import metrics
from observability.clock import steady_clock
from observability.export import MetricSet
from observability.logging import get_logger
from protocol.ids import Role, WorkerRef
from router.admin import AdminBackend, ClusterInfo, PoolInfo, RouterInfo, WorkerInfo
from router.auth.key_file import KeyFile
from router.auth.tls import Tls
from router.config import RouterConfig
from router.dispatch.request_trace import make_tracing
from router.dispatch.sequence_run import Dispatcher
from router.grpc.admin import AdminServicer
from router.grpc.inference import InferenceServicer
from router.grpc.server import GrpcServer
from router.openai.app import make_app, make_metrics_app
from router.openai.server import HttpServer
from router.served_model import ServedModel
from router.service import InferenceService
from router.workers.worker_client import WorkerClient
from router.workers.worker_set import WorkerSet

if TYPE_CHECKING:
    from observability.tracing import Tracing

log = get_logger(__name__)

_HEALTH_CHECK_S = 5.0
_FILE_CHECK_S = 1.0
#: After a limit, for the error to reach those who are cut off.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddresses:
    """Where the two doors listen, and where this router alone answers /metrics, as `host:port`."""

    http: str
    grpc: str
    metrics: str


class Router:
    """The front door of one process, on one event loop. Knows nothing of Ray.

    Whoever runs it calls `start` once, `set_workers` whenever the set of ready workers changes,
    and at the end `retire` and `stop`. Construction reads the model's folder and may take a second.
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
        self.addresses = RouterAddresses(http="", grpc="", metrics="")
        self._access = KeyFile(config.api_keys_file, tiers=frozenset(config.service_tiers))
        self._tls = Tls(config.tls)
        self._tracing = tracing or make_tracing(config.otlp_endpoint, self.router_id)
        self._model = ServedModel(config)
        self._members = WorkerSet(router_id=self.router_id, secret=secret, config=config)
        relay = Dispatcher(
            router_id=self.router_id,
            members=self._members,
            secret=secret,
            config=config,
            metric_set=self.metrics,
            clock=steady_clock(),
            rng=random.Random(),
        )
        self._service = InferenceService(self._model, relay, tracing=self._tracing)
        app = make_app(
            self._service,
            access=self._access,
            metrics_text=self.metrics_text,
            max_body_bytes=config.max_body_bytes,
            model=self._model,
            metrics_targets=lambda: self._targets or (self.addresses.metrics,),
            cors_origins=config.cors_origins,
        )
        self._http = self._listener(app)
        self._scrapes = self._listener(make_metrics_app(self.metrics_text))
        self._grpc = GrpcServer(
            InferenceServicer(self._service),
            AdminServicer(self.view, admin) if config.admin_enabled else None,
            access=self._access,
            credentials=self._tls.grpc_credentials(),
            config=config,
        )
        self._targets, self._retiring = tuple[str, ...](), False
        self._tasks: list[asyncio.Task[None]] = []

    def _listener(self, app: ASGIApp) -> HttpServer:
        return HttpServer(
            app,
            tls=self._tls.context,
            keep_alive_s=self.config.keep_alive_s,
            max_connections=self.config.max_connections,
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
    ) -> RouterAddresses:
        """Listen on both doors and for scrapes (port 0: any free one). Live at once, ready with the
        first worker.

        Raises Unavailable, naming http_port, grpc_port or metrics_port, when it cannot be had.
        """
        try:
            http = await self._http.start(http_host, http_port, "http_port")
            grpc = await self._grpc.start(grpc_host, grpc_port)
            # Shared while one router takes over from another.
            scrapes = await self._scrapes.start(http_host, metrics_port, "metrics_port")
        except BaseException:
            await self.stop()
            raise
        self.addresses = RouterAddresses(http=http, grpc=grpc, metrics=scrapes)
        self._tasks = [
            asyncio.create_task(self._keep_health()),
            asyncio.create_task(self._keep_files()),
        ]
        log.info("router started", extra={"http": http, "grpc": grpc, "router": self.router_id})
        return self.addresses

    async def retire(self, timeout_s: float | None = None) -> bool:
        """Stop listening and wait for the requests in flight; whether all ended within `timeout_s`
        (the configured time if None).

        For a router that leaves while others stay: with a shared port, new connections reach those
        at once, and open ones are told to go there (GOAWAY, or closed after their answer) instead
        of being refused. `stop` still has to follow.
        """
        limit = self.config.drain_s if timeout_s is None else timeout_s
        self._retiring = True
        cut_s = limit + _LAST_WORDS_S
        closing = asyncio.gather(self._grpc.stop(cut_s), self._http.stop(cut_s))
        # Not until nothing is in flight: a request may still be on its way in.
        await asyncio.wait({closing}, timeout=limit)
        ended = not self.num_requests
        self._service.admission.close()
        await closing
        return ended

    async def stop(self) -> None:
        """Close both doors and every stream. Requests in flight end in an error; idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._service.admission.close()
        await asyncio.gather(self._grpc.stop(), self._http.stop(), self._scrapes.stop())
        await self._members.close()
        self._model.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # --- the cluster ------------------------------------------------------------------------------

    def set_workers(self, refs: Sequence[WorkerRef]) -> None:
        """Serve from exactly these workers.

        New ones take requests once their event stream is up; those no longer named finish what they
        have. Call on the router's event loop, after `start`.
        """
        self._members.set(refs)

    def set_routers(self, targets: Sequence[str]) -> None:
        """There are so many routers in the cluster, which answer scrapes there, this one among
        them. Call like `set_workers`."""
        self._targets = tuple(targets)
        self._service.share_limits(max(1, len(targets)))

    def warm_up(self) -> None:
        """Start what the first structured request would else wait a second for: call when ready."""
        self._model.forms.begin()

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted now."""
        return self._service.ready

    @property
    def num_requests(self) -> int:
        """Sequences in flight."""
        return self._service.admission.in_flight

    def view(self) -> ClusterInfo:
        """The cluster as this router sees it."""
        members = self._members.all()
        pools = tuple(
            PoolInfo(
                role=role, workers=tuple(_worker_view(m) for m in members if m.ref.role is role)
            )
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
        """The metrics of this router and of the workers it hears of, in Prometheus' text format."""
        await self._members.refresh()
        # What a lost one said last, that it is ready for instance, may be true no more.
        heard = {m.ref.worker_id: m.status for m in self._members.all() if m.connected and m.status}
        self.metrics.workers.statuses = tuple(heard.values())
        return self.metrics.render()

    # --- parts ------------------------------------------------------------------------------------

    async def _keep_health(self) -> None:
        """Keep grpc.health.v1 in step with readiness."""
        serving: bool | None = None
        while True:
            if self.ready is not serving:
                serving = self.ready
                await self._grpc.set_serving(serving)
                continue  # it may have changed meanwhile
            await self._members.changed(_HEALTH_CHECK_S)

    async def _keep_files(self) -> None:
        """Follow the files that may change while this runs."""
        while True:
            await asyncio.sleep(_FILE_CHECK_S)
            try:
                await self._access.refresh()
                await self._tls.refresh()
            except Exception:
                log.exception("files are not reloaded")  # next time, perhaps

    def _state(self) -> str:
        if self._service.admission.draining or self._retiring:
            return "draining"
        return "ready" if self._service.ready else "waiting for workers"


def _worker_view(member: WorkerClient) -> WorkerInfo:
    if not member.connected:
        state = "lost" if member.status is not None else "connecting"
    elif member.leaving:
        state = "leaving"
    else:
        state = "connected" if member.status is None else member.status.state.value
    return WorkerInfo(
        ref=member.ref, state=state, load=member.load, in_flight=member.reservations.in_flight
    )
