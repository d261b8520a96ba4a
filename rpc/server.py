"""The server of control methods.

No layer lies between the socket and a handler, so a call or an item of a stream takes a fraction of
what it takes through gRPC, whose Python side passes every message between threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from framing.ports import bind_free
from framing.session import Connection, FrameError
from observability.logging import get_logger
from protocol import codec
from protocol.errors import BatonError, Internal, Unavailable
from rpc.methods import ITEMS_PER_REPORT, STREAM_ITEMS, FrameKind, Handler, Method, unpack_call

#: Time for a caller to prove the secret.
_HANDSHAKE_S = 5.0
_BACKLOG = 1024
_Bound = tuple[Method[Any, Any], Handler]
log = get_logger(__name__)


class ControlServer:
    """Serves control methods on a port of its own, to clients that know the cluster's secret.

    Errors of protocol.errors reach the client as themselves, any other as Internal.
    """

    def __init__(
        self, handlers: Mapping[Method[Any, Any], Handler] | None = None, *, secret: bytes
    ) -> None:
        self.secret = secret
        self.address = ""
        self.handlers: dict[str, _Bound] = {}
        self.connections: set[_ClientConnection] = set()
        self.stopped = False
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self.add(handlers or {})

    def bind(self, host: str = "127.0.0.1", ports: str = "") -> str:
        """Take a free port of `host`, in the range `ports` if given; return the `host:port` to
        advertise. Serving begins with `start`, so handlers that need the address can still be
        added."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # Accepted sockets inherit it, whatever the event loop does.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            bind_free(listener, host.strip("[]"), ports)
        except OSError as error:
            listener.close()
            raise Unavailable(
                f"cannot bind a control port on {host}: {error.strerror}", param="host"
            ) from error
        self._listener = listener
        self.address = f"{host}:{listener.getsockname()[1]}"
        return self.address

    def add(self, handlers: Mapping[Method[Any, Any], Handler]) -> None:
        self.handlers |= {method.path: (method, handler) for method, handler in handlers.items()}

    async def start(self, host: str = "127.0.0.1") -> str:
        """Serve, on a free port of `host` unless `bind` took one; return the address."""
        if self._listener is None:
            self.bind(host)
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _ClientConnection(self), sock=self._listener, backlog=_BACKLOG
        )
        return self.address

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stop accepting; running calls get `grace_s` seconds. Then close every connection, after
        what was sent on it."""
        self.stopped = True
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()
        self._server = self._listener = None
        calls = [task for connection in self.connections for task in connection.calls]
        if calls and grace_s:
            await asyncio.wait(calls, timeout=grace_s)
        for connection in list(self.connections):
            connection.close()


class _ClientConnection(Connection):
    """Calls and streams of one client. CANCEL and a lost connection cancel their handlers."""

    def __init__(self, server: ControlServer) -> None:
        super().__init__(server.secret, is_client=False)
        self.calls: set[asyncio.Task[Any]] = set()
        self._server = server
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._credits: dict[int, asyncio.Semaphore] = {}  # of streams: items that may be sent
        self._writable = asyncio.Event()
        self._writable.set()
        self._handshake_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect the handshake in time."""
        super().connection_made(transport)
        self._server.connections.add(self)
        if self._server.stopped:  # accepted while the server stopped
            self.abort()
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(_HANDSHAKE_S, self._expect_authenticated)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._server.connections.discard(self)
        for task in self._running.values():
            task.cancel()

    def pause_writing(self) -> None:
        """Hold streams up: the client reads more slowly than they send."""
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """Start or cancel a call or stream, or grant a stream more items."""
        if kind in (FrameKind.CALL, FrameKind.STREAM) and number in self._running:
            raise FrameError(f"number {number} is in use")
        if kind == FrameKind.CALL:
            self._call(number, payload)
        elif kind == FrameKind.STREAM:
            self._start(number, self._stream(number, payload))
        elif kind == FrameKind.CANCEL and number in self._running:
            self._running[number].cancel()
        elif kind == FrameKind.ITEMS_READ and number in self._credits:
            for _ in range(ITEMS_PER_REPORT):
                self._credits[number].release()

    def _start(self, number: int, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._running[number] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._running.pop(number, None))
        return task

    def _call(self, number: int, payload: bytes) -> None:
        """Run a call; a handler that is no coroutine needs no task."""
        path, request = unpack_call(payload)
        try:
            method, handler = self._find(path, streams=False)
            try:
                reply = handler(codec.decode(method.request, request))
            except Exception as error:
                raise _as_typed(method, error) from error
        except BatonError as error:
            self._send_error(number, error)
            return
        if not isinstance(reply, Coroutine):
            self.send(FrameKind.REPLY, number, codec.encode(reply))
            return
        # The task is the handler itself: a task that awaits it and is cancelled before it starts
        # would leave it unawaited.
        task = self._start(number, reply)
        self.calls.add(task)
        task.add_done_callback(partial(self._reply, number, method))

    def _reply(self, number: int, method: Method[Any, Any], task: asyncio.Task[Any]) -> None:
        self.calls.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.send(FrameKind.REPLY, number, codec.encode(task.result()))
        else:
            self._send_error(number, _as_typed(method, error))

    def _send_error(self, number: int, error: BatonError) -> None:
        self.send(FrameKind.ERROR, number, codec.encode(error.info()))

    async def _stream(self, number: int, payload: bytes) -> None:
        path, request = unpack_call(payload)
        credits = self._credits[number] = asyncio.Semaphore(STREAM_ITEMS)
        try:
            method, handler = self._find(path, streams=True)
            try:
                replies = handler(codec.decode(method.request, request))
                async with aclosing(replies):
                    async for reply in replies:
                        self.send(FrameKind.ITEM, number, codec.encode(reply))
                        await self._writable.wait()
                        await credits.acquire()
            except Exception as error:
                raise _as_typed(method, error) from error
        except BatonError as error:
            self._send_error(number, error)
        else:
            self.send(FrameKind.END, number, b"")
        finally:
            del self._credits[number]

    def _find(self, path: str, *, streams: bool) -> _Bound:
        found = self._server.handlers.get(path)
        if found is None or found[0].streams is not streams:
            raise Unavailable(f"no {'stream' if streams else 'method'} {path} here")
        return found

    def _expect_authenticated(self) -> None:
        if not self.authenticated:
            self.abort()


def _as_typed(method: Method[Any, Any], error: BaseException) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("control method failed", exc_info=error, extra={"method": method.path})
    return Internal(f"{method.name}: {type(error).__name__}: {error}")
