"""Serve and call typed control methods over gRPC.

A method is declared once (`Method`) and used by both sides. Errors of protocol.errors cross
the wire as themselves: the server puts the ErrorInfo into the trailing metadata, the client raises
it again.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from observability.logging import get_logger
from protocol import codec
from protocol.errors import (
    GRPC_STATUS,
    BatonError,
    DeadlineExceeded,
    ErrorInfo,
    Internal,
    Unauthenticated,
    Unavailable,
)
from rpc.quick import Answer, Items, QuickClient, QuickServer

Req = TypeVar("Req")
Rep = TypeVar("Rep")

ERROR_KEY = "baton-error-bin"
SECRET_KEY = "baton-secret-bin"
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
#: To connect for a quick stream.
_MEETING_S = 5.0
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Rep]):
    """One control method: `/service/name`, its message classes, whether it streams replies, and
    whether it goes the quick way (rpc.quick) because its latency counts; streams always do."""

    service: str
    name: str
    request: type[Req]
    reply: type[Rep]
    streams: bool = False
    quick: bool = False

    @property
    def path(self) -> str:
        """The full gRPC method path."""
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickQuery:
    """Where does a server take quick calls?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickPort:
    """The port, on the host of the control server."""

    port: int


_QUICK = Method("baton.control.v1.Quick", "Port", QuickQuery, QuickPort)

Handler = Callable[[Any], Awaitable[Any] | AsyncIterator[Any]]


class ControlServer:
    """A gRPC server of control methods on a port of its own (bind to 0, then advertise `address`).

    Callers must present the cluster's secret; it is compared in constant time.
    """

    def __init__(
        self, handlers: Mapping[Method[Any, Any], Handler] | None = None, *, secret: bytes
    ) -> None:
        self._handlers = dict(handlers or {})
        self._secret = secret
        self._server: aio.Server | None = None
        self._quick: QuickServer | None = None
        self.address = ""

    def bind(self, host: str = "127.0.0.1") -> str:
        """Take a free port of `host`; return the `host:port` to advertise. Nothing is served yet,
        so handlers that need to know the address can still be added."""
        server = aio.server(options=_OPTIONS)
        try:
            port = server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            raise Unavailable(f"cannot bind a control port on {host}", param="host") from error
        self._server = server
        self.address = f"{host}:{port}"
        return self.address

    def add(self, handlers: Mapping[Method[Any, Any], Handler]) -> None:
        """Serve these methods too; only before `start`."""
        self._handlers.update(handlers)

    async def start(self, host: str = "127.0.0.1") -> str:
        """Serve, on a free port of `host` unless `bind` took one; return the address."""
        if self._server is None:
            self.bind(host)
        assert self._server is not None
        await self._start_quick()
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        for method, handler in self._handlers.items():
            if not (method.quick or method.streams):
                services.setdefault(method.service, {})[method.name] = self._bind(method, handler)
        for service, methods in services.items():
            generic = grpc.method_handlers_generic_handler(service, methods)
            self._server.add_generic_rpc_handlers((generic,))
        await self._server.start()
        return self.address

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stop accepting calls; running ones get `grace_s` seconds."""
        if self._quick is not None:
            self._quick.stop()
            self._quick = None
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    async def _start_quick(self) -> None:
        quick = {m: handler for m, handler in self._handlers.items() if m.quick or m.streams}
        if not quick:
            return
        self._quick = QuickServer(
            {m.path: _quick_answer(m, handler) for m, handler in quick.items() if not m.streams},
            {m.path: _quick_items(m, handler) for m, handler in quick.items() if m.streams},
            secret=self._secret,
        )
        port = await self._quick.start(self.address.rpartition(":")[0].strip("[]"))

        async def tell(_: QuickQuery) -> QuickPort:
            return QuickPort(port=port)

        self._handlers[_QUICK] = tell

    def _check_secret(self, context: aio.ServicerContext[Any, Any]) -> None:
        for key, value in context.invocation_metadata() or ():
            if key == SECRET_KEY and isinstance(value, bytes):
                if hmac.compare_digest(value, self._secret):
                    return
                break
        raise Unauthenticated("the control channel needs the cluster's secret")

    def _bind(self, method: Method[Any, Any], handler: Handler) -> grpc.RpcMethodHandler[Any, Any]:
        async def unary(request: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
            try:
                self._check_secret(context)
                reply = await handler(codec.decode(method.request, request))  # type: ignore[misc]
            except Exception as error:
                await _abort(context, method, error)
                raise
            return codec.encode(reply)

        return grpc.unary_unary_rpc_method_handler(unary)


async def _abort(
    context: aio.ServicerContext[Any, Any], method: Method[Any, Any], error: Exception
) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    info = _as_typed(method, error).info()
    await context.abort(
        grpc.StatusCode[GRPC_STATUS[info.code]],
        info.message,
        ((ERROR_KEY, codec.encode(info)),),
    )


def _as_typed(method: Method[Any, Any], error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("control method failed", exc_info=error, extra={"method": method.path})
    return Internal(f"{method.name}: {type(error).__name__}: {error}")


def _quick_answer(method: Method[Any, Any], handler: Handler) -> Answer:
    async def answer(request: bytes) -> bytes:
        try:
            reply = await handler(codec.decode(method.request, request))  # type: ignore[misc]
        except Exception as error:
            raise _as_typed(method, error) from error
        return codec.encode(reply)

    return answer


def _quick_items(method: Method[Any, Any], handler: Handler) -> Items:
    async def items(request: bytes) -> AsyncIterator[bytes]:
        try:
            replies = handler(codec.decode(method.request, request))
            async with aclosing(replies):  # type: ignore[type-var]
                async for reply in replies:  # type: ignore[union-attr]
                    yield codec.encode(reply)
        except Exception as error:
            raise _as_typed(method, error) from error

    return items


class ControlClient:
    """Calls control methods of one peer. Every call has a deadline; errors arrive typed."""

    def __init__(self, address: str, *, secret: bytes) -> None:
        self.address = address
        self._channel = aio.insecure_channel(address, options=_OPTIONS)
        self._metadata = ((SECRET_KEY, secret),)
        self._secret = secret
        self._quick: QuickClient | None = None
        self._meeting = asyncio.Lock()

    async def call(self, method: Method[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        """One reply. Raises the peer's typed error, Unavailable when it cannot be reached, or
        DeadlineExceeded after `timeout_s` seconds."""
        if method.quick:
            quick = await self._meet(timeout_s)
            reply = await quick.call(method.path, codec.encode(request), timeout_s)
            return codec.decode(method.reply, reply)
        return await self._call(method, request, timeout_s)

    async def _meet(self, timeout_s: float) -> QuickClient:
        """The connection for quick calls; made, where the server says, if there is none."""
        if self._quick is not None and not self._quick.broken:
            return self._quick
        async with self._meeting:
            if self._quick is not None and not self._quick.broken:
                return self._quick
            where = await self._call(_QUICK, QuickQuery(), timeout_s)
            host = self.address.rpartition(":")[0].strip("[]")
            try:
                async with asyncio.timeout(timeout_s):
                    self._quick = await QuickClient.connect(
                        host, where.port, name=self.address, secret=self._secret
                    )
            except (OSError, TimeoutError) as error:
                raise Unavailable(f"{self.address}: cannot connect for quick calls") from error
            return self._quick

    async def _call(self, method: Method[Req, Rep], request: Req, timeout_s: float) -> Rep:
        rpc: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method.path)
        try:
            data = await rpc(codec.encode(request), timeout=timeout_s, metadata=self._metadata)
        except aio.AioRpcError as error:
            raise self._typed(error, method) from error
        return codec.decode(method.reply, data)

    async def stream(self, method: Method[Req, Rep], request: Req) -> AsyncIterator[Rep]:
        """Replies until the peer ends the stream; closing the iterator cancels it."""
        quick = await self._meet(_MEETING_S)
        items = quick.stream(method.path, codec.encode(request))
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                yield codec.decode(method.reply, item)

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        if self._quick is not None:
            self._quick.close()
        await self._channel.close(None)

    def _typed(self, error: aio.AioRpcError, method: Method[Any, Any]) -> BatonError:
        for key, value in error.trailing_metadata() or ():
            if key == ERROR_KEY and isinstance(value, bytes):
                return codec.decode(ErrorInfo, value).to_error()
        where = f"{method.name} at {self.address}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{where}: no answer in time")
        return Unavailable(f"{where}: {error.code().name}: {error.details()}")


class ClientPool:
    """One ControlClient per address, made on first use."""

    def __init__(self, *, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, ControlClient] = {}

    def get(self, address: str) -> ControlClient:
        """The client of `address`."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = ControlClient(address, secret=self._secret)
        return client

    async def drop(self, address: str) -> None:
        """Forget a peer that has left."""
        client = self._clients.pop(address, None)
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Close every channel."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients))
