"""The HTTP listener: uvicorn with httptools, on the running event loop and a socket bound here. Its
connections have limits for clients that neither send nor read."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from framing.ports import bind_free
from protocol.errors import BatonError, InvalidRequest, Unavailable
from router.openai.errors import JSON_TYPE, error_body, error_headers, error_status
from router.request.generate_request import REQUEST_ID, RequestId, make_request_id

#: Bytes of a request's head.
MAX_HEAD_BYTES = 1 << 16
_LARGE_HEAD = f"The head is larger than {MAX_HEAD_BYTES} bytes."
#: What a line of a head has beside name and value.
_LINE_BYTES = len(": \r\n")
#: Time for the head of a request, from connecting or from its first byte, and for the rest of a
#: body that has been answered.
HEAD_S = 60.0
#: Pipelined requests behind the one that is answered. One read of a connection may bring thousands.
MAX_PIPELINED = 64
#: Time for a client over the connection limit to send its request. A request to a closed connection
#: is answered with a reset, after which some clients do not read the refusal.
_REFUSAL_S = 1.0
#: A client that has sent no request for so long makes room when no other connection is left.
_SLOW_S = 2.0
_HANG_UP = "baton.hang_up"
_ID = "baton.request_id"
_BACKLOG = 2048
#: Turns of the event loop in which it hands on a connection that it has accepted.
_TAKING = 3
_HEAD_END = b"\r\n\r\n"
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpConnection(HttpToolsProtocol):
    """Bounds heads in size and time, and drops answers that are not read. Every answer carries the
    name of its request, errors included."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes: int | None = 0  # of the head that is being read; None in a body
        self._num_heads = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answering: Any = None  # the request that is being answered
        self._admitted = True
        self._fault = ""  # why the parser was stopped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or refuse it over the limit of connections."""
        super().connection_made(transport)
        self._admitted = self.connections.admit()  # type: ignore[attr-defined]
        if self._admitted:
            self._expect_head()
        else:
            self._timer = self.loop.call_later(_REFUSAL_S, self._refuse_connection)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the last one in the pipeline."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._head_came()

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            self._refuse_connection()
            return
        in_head, heads = self._head_bytes, self._num_heads
        super().data_received(data if in_head is None else _declined(data))
        if in_head is None or heads != self._num_heads:
            return
        self._head_bytes = in_head + len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_LARGE_HEAD)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        lines = sum(len(name) + len(value) + _LINE_BYTES for name, value in self.headers)
        if len(self.url) + lines > MAX_HEAD_BYTES:  # in one read
            self._fault = _LARGE_HEAD
            raise ValueError(_LARGE_HEAD)
        if self.parser.should_upgrade():  # split over two reads; the body would count as a request
            raise ValueError("the client offers another protocol")
        self._head_came()
        self._head_bytes = None
        self._num_heads += 1
        self.scope[_HANG_UP] = self.transport.abort  # type: ignore[literal-required]
        request_id = make_request_id(Headers(raw=self.headers).get(REQUEST_ID))
        self.scope[_ID] = request_id  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            send = partial(_send_unchunked, self.cycle, self.cycle.send)
            self.cycle.send = send  # type: ignore[method-assign]
        self.cycle.default_headers = [*self.cycle.default_headers, _header(request_id)]
        if self.connections.leaving:  # type: ignore[attr-defined]
            self.cycle.keep_alive = False
        if self.expect_100_continue:  # a client that gets an answer instead may leave the body out
            self.cycle.keep_alive = False
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many pipelined requests")  # stops the parser

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.expect_100_continue:
            leaving = self.connections.leaving  # type: ignore[attr-defined]
            self.cycle.keep_alive = self.parser.should_keep_alive() and not leaving
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of an answered body."""
        super().on_response_complete()
        if self._head_bytes is None and self.cycle.response_complete:
            self._expect_head()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort one whose last answer is still unread."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _refuse_connection(self) -> None:
        self._refuse(Unavailable("too many connections are open"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless another answer is half sent."""
        answer = self._answering
        if answer is not None and answer.response_started and not answer.response_complete:
            self.transport.close()
        else:
            self._refuse(InvalidRequest(self._fault or msg))

    def _refuse(self, error: BatonError) -> None:
        body = error_body(error)
        headers = [
            *(*self.server_state.default_headers, _header(make_request_id(None))),
            *(JSON_TYPE, *error_headers(error), (b"connection", b"close")),
            (b"content-length", b"%d" % len(body)),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        status = STATUS_LINE[error_status(error)]
        self.transport.write(b"".join([status, *lines, b"\r\n", body]))
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._head_came()
        self._timer = self.loop.call_later(HEAD_S, self.transport.abort)
        self.connections.without_head[self] = self.loop.time()  # type: ignore[attr-defined]

    def _head_came(self) -> None:
        self.connections.without_head.pop(self, None)  # type: ignore[attr-defined]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _send_unchunked(cycle: Any, send: Callable[[Any], Any], message: Message) -> None:
    """Send a part of an answer over HTTP/1.0, which has no chunks (RFC 9112, section 6.1): one
    without a length ends with the connection."""
    if message["type"] == "http.response.body":
        if cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))
    elif all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
        cycle.chunked_encoding = False
    await send(message)


def _declined(data: bytes) -> bytes:
    """A head without its offer of another protocol (`Upgrade: h2c`, the default of Java's clients):
    the parser would take the body for that protocol. Clients go on without it."""
    head, end, rest = data.partition(_HEAD_END)
    return _OFFER.sub(b"\r\nnot-taken:", head) + end + rest if _OFFER.search(head) else data


def _header(request_id: RequestId) -> tuple[bytes, bytes]:
    return REQUEST_ID.encode(), request_id.name.encode()


def request_id_of(scope: Scope) -> RequestId:
    request_id: RequestId = scope[_ID]
    return request_id


def hang_up(scope: Scope) -> None:
    """Close the connection of a request at once and drop what is unsent."""
    abort = scope.get(_HANG_UP)
    if abort is not None:
        abort()


class HttpServer:
    """Serves an application from `start` until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tls: ssl.SSLContext | None,
        keep_alive_s: int,
        max_connections: int,
        on_refusal: Callable[[], None],
        reuse_port: bool,
    ) -> None:
        """`on_refusal` is called for each connection beyond `max_connections`."""
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # warnings let clients that send no HTTP fill the log
            access_log=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
            backlog=_BACKLOG,
        )
        self._config.load()
        self._config.ssl = tls
        self._max_connections, self._on_refusal = max_connections, on_refusal
        self._reuse_port = reuse_port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, param: str, ports: str = "") -> str:
        """Bind (port 0: any free one, of the range `ports` if given) and serve; returns the bound
        `host:port`. Raises Unavailable naming `param` when binding fails."""
        listener = _bind(host, port, param, ports=ports, reuse_port=self._reuse_port)
        connections = _Connections(self._max_connections, self._on_refusal)
        self._server = _Server(self._config, connections)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self._task}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            await self._task
            raise Unavailable("the HTTP server ended while starting")
        where = f"[{host}]" if ":" in host else host
        return f"{where}:{listener.getsockname()[1]}"

    async def stop(self, grace_s: float = 1.0, idle_s: float = 0.0) -> None:
        """Stop listening and close every connection after its answer or `grace_s` seconds, idle
        ones after their next answer or `idle_s` seconds."""
        if self._server is not None and self._task is not None:
            self._config.timeout_graceful_shutdown = math.ceil(grace_s)
            self._server.leave(min(idle_s, grace_s))
            await self._task
            self._server = self._task = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config, connections: _Connections) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._leaving = asyncio.Event()
        self._idle_s = 0.0
        self._connections = self.server_state.connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """Refresh the date header once a second until `leave`; uvicorn polls every tenth."""
        tenths = 0
        while not await self.on_tick(tenths):
            tenths += 10
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but loses no request that is on its way, and returns with the last
        connection; uvicorn polls every tenth."""
        waiting = await self._stop_listening(sockets or [])
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await asyncio.gather(
                    self._connections.leave(self._idle_s), *waiting, return_exceptions=True
                )
                await self._connections.none.wait()
                await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()

    async def _stop_listening(
        self, listeners: list[socket.socket]
    ) -> list[Coroutine[Any, Any, Any]]:
        """Close the listeners; what takes the connections that the kernel has made for them
        meanwhile, which closing would reset."""
        loop = asyncio.get_running_loop()
        for listener in listeners:
            loop.remove_reader(listener)
        for _ in range(_TAKING):
            await asyncio.sleep(0)
        accepted = [one for listener in listeners for one in _accepted(listener)]
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()
        make = partial(
            HttpConnection, config=self.config, server_state=self.server_state, app_state={}
        )
        return [loop.connect_accepted_socket(make, one, ssl=self.config.ssl) for one in accepted]

    def leave(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Connections(set[Any]):
    """The open connections; `none` is set while there are none. without_head: those that have not
    sent the head of a request, longest first, with the time since when they are waited for.
    leaving: each ends with the next answer."""

    def __init__(self, max_connections: int, on_refusal: Callable[[], None]) -> None:
        super().__init__()
        self.none = asyncio.Event()
        self.none.set()
        self.without_head: dict[HttpConnection, float] = {}
        self.leaving = False
        self._max_connections = max_connections
        self._on_refusal = on_refusal

    def add(self, connection: Any) -> None:
        super().add(connection)
        self.none.clear()

    def admit(self) -> bool:
        """Whether there is room for one more, which the slowest client without a request makes."""
        if len(self) <= self._max_connections:
            return True
        self._on_refusal()
        slowest = next(iter(self.without_head.items()), None)
        if slowest is None or slowest[0].loop.time() - slowest[1] < _SLOW_S:
            return False
        del self.without_head[slowest[0]]
        slowest[0].transport.abort()
        return True

    async def leave(self, idle_s: float) -> None:
        """Close each after the next answer; those that stay idle, after `idle_s` seconds."""
        self.leaving = True
        for connection in self:
            if connection.cycle is not None:
                connection.cycle.keep_alive = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle_s):
                await self.none.wait()
        for connection in tuple(self):
            connection.shutdown()

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        if not self:
            self.none.set()


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield listener.accept()[0]


def _bind(host: str, port: int, param: str, *, ports: str, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay (40 ms an answer) off only for sockets declared as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port and port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        if port:
            listener.bind((host, port))
        else:
            bind_free(listener, host, ports)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}", param=param) from error
    listener.setblocking(False)
    return listener
