"""The gRPC listener: both services of baton.v1, grpc.health.v1, reflection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from observability.logging import get_logger
from protocol.errors import BatonError, InvalidRequest, Unavailable, typed
from protocol.wire import inference_pb2 as pb
from router.auth.keys import KeyFile
from router.config import RouterConfig
from router.grpc.admin import AdminServicer
from router.grpc.call import abort, metadata_value
from router.grpc.inference import InferenceServicer

M = TypeVar("M", bound=Message)
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "aio.ServicerContext[Any, Any]"
_Method = Callable[..., Awaitable[Any]]
log = get_logger(__name__)

#: Received calls whose handler has not begun.
_MAX_PENDING = 1 << 20
#: Open calls of one connection: each costs 20 kB before its message and key arrive. Far above what
#: clients use, as calls beyond it in one burst fail.
_MAX_STREAMS = 1 << 14
#: Age at which clients are asked to reconnect; no shorter than the longest request.
_MIN_AGE_S = 3600.0
_MAX_MS = (1 << 31) - 1

INFERENCE = "baton.v1.Inference"
ADMIN = "baton.v1.Admin"


class GrpcServer:
    """Serves from `start` until `stop`; health is NOT_SERVING until `set_serving`."""

    def __init__(
        self,
        inference: InferenceServicer,
        admin: AdminServicer | None,
        *,
        access: KeyFile,
        credentials: grpc.ServerCredentials | None,
        config: RouterConfig,
    ) -> None:
        age_ms = min(int(max(_MIN_AGE_S, config.max_timeout_s) * 1000), _MAX_MS)
        self._access = access
        self._credentials = credentials
        self._inference = inference
        self._admin = admin
        self._options: list[tuple[str, int]] = [
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.so_reuseport", int(config.reuse_port)),
            ("grpc.max_allowed_incoming_connections", config.max_connections),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            # Ends calls that are never sent or never read, after twice this age.
            ("grpc.max_connection_age_ms", age_ms),
            ("grpc.max_connection_age_grace_ms", age_ms),
            # Clients may keep connections alive with pings.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Beyond these gRPC cancels calls at random; router.admission refuses them earlier.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        ]
        self._health = _Health()
        self._services = [INFERENCE] if admin is None else [INFERENCE, ADMIN]
        self._server: aio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Bind (port 0: any free one) and serve; returns the bound `host:port`."""
        server = aio.server(options=self._options)
        handlers = {INFERENCE: _inference_handlers(self._inference, _Guard(self._access))}
        if self._admin is not None:
            handlers[ADMIN] = _admin_handlers(self._admin, _Guard(self._access, admin=True))
        for service, methods in handlers.items():
            generic = grpc.method_handlers_generic_handler(service, methods)
            server.add_generic_rpc_handlers((generic,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            _GuardedReflection(names, self._access), server
        )
        await self.set_serving(False)
        where = f"[{host}]" if ":" in host else host
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(f"{where}:{port}")
            else:
                bound = server.add_secure_port(f"{where}:{port}", self._credentials)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error}", param="grpc_port"
            ) from None
        await server.start()
        self._server = server
        return f"{where}:{bound}"

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of grpc.health.v1 for the server and its services."""
        states = health_pb2.HealthCheckResponse.ServingStatus
        state = states.Value("SERVING" if serving else "NOT_SERVING")
        for service in ("", *self._services):
            await self._health.set(service, state)

    async def stop(self, grace_s: float = 0.5) -> None:
        if self._server is not None:
            self._health.end_watches()
            await self._server.stop(grace_s)
            self._server = None


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Health that ends its watches: they would hold up a router that stops."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[asyncio.Timeout] = set()

    async def Watch(self, request: Any, context: _Context) -> None:  # noqa: N802 - gRPC names it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as end:
                self._ends.add(end)
                try:
                    await super().Watch(request, context)
                finally:
                    self._ends.discard(end)

    def end_watches(self) -> None:
        for end in self._ends:
            end.reschedule(0.0)


class _Guard:
    """Checks the key of each call and that its message has parsed, hands it on, and ends it with
    the status of whatever was raised."""

    def __init__(self, access: KeyFile, *, admin: bool = False) -> None:
        self._access = access
        self._admin = admin

    def unary(self, method: _Method, kind: type[M]) -> _Handler:
        return grpc.unary_unary_rpc_method_handler(
            self.checked(method),
            request_deserializer=_parser(kind),
            response_serializer=lambda reply: reply.SerializeToString(),
        )

    def checked(self, method: _Method) -> _Method:
        """`method(request, context, caller)`, called when the key allows it."""

        async def call(request: Any, context: _Context) -> Any:
            try:
                caller = self._access.caller(metadata_value(context, "authorization"))
                if self._admin:
                    caller.check_admin()
                    log.info("admin call", extra={"method": method.__name__, "key": caller.name})
                if isinstance(request, InvalidRequest):
                    raise request
                return await method(request, context, caller)
            except BatonError as error:
                await abort(context, error)
            except Exception as error:
                log.exception("call failed", extra={"method": method.__name__})
                await abort(context, typed(error))

        return call


class _GuardedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Reflection for callers with a key."""

    def __init__(self, names: Sequence[str], access: KeyFile) -> None:
        super().__init__(names)
        self._access = access

    async def ServerReflectionInfo(  # noqa: N802 - the name of the method on the wire
        self, request_iterator: AsyncIterator[Any], context: _Context
    ) -> AsyncIterator[Any]:
        try:
            self._access.caller(metadata_value(context, "authorization"))
        except BatonError as error:
            await abort(context, error)
        async for reply in super().ServerReflectionInfo(request_iterator, context):
            yield reply


def _inference_handlers(servicer: InferenceServicer, guard: _Guard) -> dict[str, _Handler]:
    generate = grpc.unary_stream_rpc_method_handler(
        guard.checked(servicer.generate),
        request_deserializer=_parser(pb.GenerateRequest),
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    return {
        "Generate": generate,
        "ListModels": guard.unary(servicer.list_models, pb.ListModelsRequest),
        "Tokenize": guard.unary(servicer.tokenize, pb.TokenizeRequest),
        "Detokenize": guard.unary(servicer.detokenize, pb.DetokenizeRequest),
    }


def _admin_handlers(servicer: AdminServicer, guard: _Guard) -> dict[str, _Handler]:
    return {
        "GetCluster": guard.unary(servicer.get_cluster, pb.GetClusterRequest),
        "Scale": guard.unary(servicer.scale, pb.ScaleRequest),
        "Drain": guard.unary(servicer.drain, pb.DrainRequest),
    }


def _parser(kind: type[M]) -> Callable[[bytes], M | InvalidRequest]:
    """A parser that returns its error: gRPC answers an exception here with INTERNAL."""

    def parse(data: bytes) -> M | InvalidRequest:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            name = kind.DESCRIPTOR.name
            return InvalidRequest(
                f"{name} does not parse: damaged, or a string is not valid UTF-8", param=name
            )
        return message

    return parse
