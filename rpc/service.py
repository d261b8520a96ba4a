"""Serve and call typed control methods.

A method is declared once (`Method`) and used by both sides. Errors of protocol.errors cross as
themselves. Everything between two processes goes over one connection (rpc.frames): nothing stands
between the socket and the handler, so a call, or an item of a stream, takes a fraction of what it
takes through gRPC, whose Python side hands every message over between threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from observability.logging import get_logger
from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, Internal, Unavailable
from protocol.message import Message
from rpc.frames import STREAM_ITEMS, TAKEN_ITEMS, FrameKind, ServerEnd
from rpc.link import ClientLink, split

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)

#: To connect for a stream.
_MEETING_S = 5.0
#: For a caller to show who it is.
_GREETING_S = 5.0
_BACKLOG = 1024
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Rep]):
    """One control method: `/service/name`, its message classes, whether it streams replies."""

    service: str
    name: str
    request: type[Req]
    reply: type[Rep]
    streams: bool = False

    @property
    def path(self) -> str:
        """The full path."""
        return f"/{self.service}/{self.name}"


#: Of a call: the reply, or a coroutine of it. Of a stream: an iterator of replies.
Handler = Callable[[Any], Any]
_Bound = tuple[Method[Any, Any], Handler]


class ControlServer:
    """Serves control methods on a port of its own (bind to 0, then advertise `address`), to those
    who know the cluster's secret."""

    def __init__(
        self, handlers: Mapping[Method[Any, Any], Handler] | None = None, *, secret: bytes
    ) -> None:
        self.secret = secret
        self.address = ""
        self.handlers: dict[str, _Bound] = {}
        self.connections: set[_Caller] = set()
        self.stopped = False
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self.add(handlers or {})

    def bind(self, host: str = "127.0.0.1") -> str:
        """Take a free port of `host`; return the `host:port` to advertise. Nothing is served yet,
        so handlers that need to know the address can still be added."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # Accepted sockets inherit it, whatever the event loop does.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((host.strip("[]"), 0))
        except OSError as error:
            listener.close()
            raise Unavailable(f"cannot bind a control port on {host}", param="host") from error
        self._listener = listener
        self.address = f"{host}:{listener.getsockname()[1]}"
        return self.address

    def add(self, handlers: Mapping[Method[Any, Any], Handler]) -> None:
        """Serve these methods too."""
        self.handlers |= {method.path: (method, handler) for method, handler in handlers.items()}

    async def start(self, host: str = "127.0.0.1") -> str:
        """Serve, on a free port of `host` unless `bind` took one; return the address."""
        if self._listener is None:
            self.bind(host)
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Caller(self), sock=self._listener, backlog=_BACKLOG
        )
        return self.address

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stop accepting; calls that run get `grace_s` seconds. Then hang up on everybody, once
        what was sent to them is on its way."""
        self.stopped = True
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()
        self._server = self._listener = None
        calls = [task for caller in self.connections for task in caller.calls]
        if calls and grace_s:
            await asyncio.wait(calls, timeout=grace_s)
        for connection in list(self.connections):
            connection.close()


class _Caller(ServerEnd):
    """A caller's calls and streams. Giving one up, or being gone, cancels its handler."""

    def __init__(self, server: ControlServer) -> None:
        super().__init__(server.secret)
        self.calls: set[asyncio.Task[Any]] = set()
        self._server = server
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._room: dict[int, asyncio.Semaphore] = {}  # of streams: items that may be sent
        self._writable = asyncio.Event()
        self._writable.set()
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait a little for who it is."""
        super().connection_made(transport)
        self._server.connections.add(self)
        if self._server.stopped:  # it came while the door closed
            self.hang_up()
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(_GREETING_S, self._expect_met)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for what runs."""
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()
        self._server.connections.discard(self)
        for task in self._running.values():
            task.cancel()

    def pause_writing(self) -> None:
        """The peer reads more slowly than we write: streams wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """A call, a stream, or that one is given up or was read on."""
        if kind == FrameKind.CALL:
            self._call(number, payload)
        elif kind == FrameKind.STREAM:
            self._start(number, self._stream(number, payload))
        elif kind == FrameKind.CANCEL and number in self._running:
            self._running[number].cancel()
        elif kind == FrameKind.TAKEN and number in self._room:
            for _ in range(TAKEN_ITEMS):
                self._room[number].release()

    def _start(self, number: int, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._running[number] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._running.pop(number, None))
        return task

    def _call(self, number: int, payload: bytes) -> None:
        """Without a task where the handler does not wait for anything."""
        path, request = split(payload)
        try:
            method, handler = self._find(path, streams=False)
            try:
                reply = handler(codec.decode(method.request, request))
            except Exception as error:
                raise _as_typed(method, error) from error
        except BatonError as error:
            self._refuse(number, error)
            return
        if not isinstance(reply, Coroutine):
            self.send(FrameKind.REPLY, number, codec.encode(reply))
            return
        # It is the task: one that awaits it, given up before it begins, would leave it unawaited.
        task = self._start(number, reply)
        self.calls.add(task)
        task.add_done_callback(partial(self._answer, number, method))

    def _answer(self, number: int, method: Method[Any, Any], task: asyncio.Task[Any]) -> None:
        self.calls.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.send(FrameKind.REPLY, number, codec.encode(task.result()))
        else:
            self._refuse(number, _as_typed(method, error))

    def _refuse(self, number: int, error: BatonError) -> None:
        self.send(FrameKind.ERROR, number, codec.encode(error.info()))

    async def _stream(self, number: int, payload: bytes) -> None:
        path, request = split(payload)
        room = self._room[number] = asyncio.Semaphore(STREAM_ITEMS)
        try:
            method, handler = self._find(path, streams=True)
            try:
                replies = handler(codec.decode(method.request, request))
                async with aclosing(replies):
                    async for reply in replies:
                        self.send(FrameKind.ITEM, number, codec.encode(reply))
                        await self._writable.wait()
                        await room.acquire()
            except Exception as error:
                raise _as_typed(method, error) from error
        except BatonError as error:
            self._refuse(number, error)
        else:
            self.send(FrameKind.END, number, b"")
        finally:
            del self._room[number]

    def _find(self, path: str, *, streams: bool) -> _Bound:
        found = self._server.handlers.get(path)
        if found is None or found[0].streams is not streams:
            raise Unavailable(f"no {'stream' if streams else 'method'} {path} here")
        return found

    def _expect_met(self) -> None:
        if not self.met:
            self.hang_up()


def _as_typed(method: Method[Any, Any], error: BaseException) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("control method failed", exc_info=error, extra={"method": method.path})
    return Internal(f"{method.name}: {type(error).__name__}: {error}")


@asynccontextmanager
async def _answered_by(limit: float, what: str) -> AsyncIterator[None]:
    """End the block with DeadlineExceeded at `limit` (the loop's time)."""
    try:
        async with asyncio.timeout_at(limit):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: no answer in time") from None


class ControlClient:
    """Calls control methods of one peer. Every call has a deadline; errors arrive typed."""

    def __init__(self, address: str, *, secret: bytes) -> None:
        self.address = address
        self._secret = secret
        self._link: ClientLink | None = None
        self._meeting = asyncio.Lock()
        self._closed = False

    async def call(self, method: Method[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        """One reply. Raises the peer's typed error, Unavailable when it cannot be reached, naming
        `address` when that is because nobody listens there, Unauthenticated when it does not know
        the secret, or DeadlineExceeded after `timeout_s` seconds."""
        limit = asyncio.get_running_loop().time() + timeout_s
        link = self._link
        if link is None or link.broken:
            async with _answered_by(limit, f"{method.path} at {self.address}"):
                link = await self._meet()
        reply = await link.call(method.path, codec.encode(request), limit)
        return codec.decode(method.reply, reply)

    async def stream(self, method: Method[Req, Rep], request: Req) -> AsyncIterator[Rep]:
        """Replies until the peer ends the stream; closing the iterator cancels it."""
        limit = asyncio.get_running_loop().time() + _MEETING_S
        async with _answered_by(limit, self.address):
            link = await self._meet()
        items = link.stream(method.path, codec.encode(request))
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                yield codec.decode(method.reply, item)

    async def close(self) -> None:
        """Hang up; calls and streams in flight fail."""
        self._closed = True
        if self._link is not None:
            self._link.hang_up()

    async def _meet(self) -> ClientLink:
        """The connection; made if there is none, by one call while the others wait."""
        if self._link is not None and not self._link.broken:
            return self._link
        async with self._meeting:
            if self._link is not None and not self._link.broken:
                return self._link
            self._check_open()
            try:
                link = await ClientLink.connect(self.address, secret=self._secret)
            except (OSError, ValueError, OverflowError) as error:
                # All but a refusal may be for want of files, ports or a network on our side.
                absent = not isinstance(error, OSError) or isinstance(error, ConnectionError)
                text, field = f"{self.address}: cannot connect: {error}", "address"
                raise Unavailable(text, param=field if absent else None) from error
            if self._closed:
                link.hang_up()
            self._check_open()  # it may have been closed meanwhile
            self._link = link
            return link

    @property
    def unused(self) -> bool:
        """Whether there is no connection, and none is being made."""
        connected = self._link is not None and not self._link.broken
        return not connected and not self._meeting.locked()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.address}: the connection was closed")


class ClientPool:
    """One ControlClient per address, made on first use and forgotten some time after its peer has
    hung up: to be asked for anew for each call."""

    def __init__(self, *, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, ControlClient] = {}

    def get(self, address: str) -> ControlClient:
        """The client of `address`."""
        client = self._clients.get(address)
        if client is None:
            self._clients = {at: kept for at, kept in self._clients.items() if not kept.unused}
            client = self._clients[address] = ControlClient(address, secret=self._secret)
        return client

    async def close(self) -> None:
        """Close every connection."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients))
