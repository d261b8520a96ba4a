"""The HTTP listener: uvicorn with httptools, on the running event loop and a socket bound here."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from protocol.errors import Unavailable
from router.openai.connection import HttpConnection

_BACKLOG = 2048


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

    async def start(self, host: str, port: int, param: str) -> str:
        """Bind (port 0: any free one) and serve; returns the bound `host:port`. Raises Unavailable
        naming `param` when binding fails."""
        listener = _bind(host, port, param, reuse_port=self._reuse_port)
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

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop listening and close every connection: idle ones at once, the others after their
        answer or `grace_s` seconds."""
        if self._server is not None and self._task is not None:
            self._config.timeout_graceful_shutdown = math.ceil(grace_s)
            self._server.leave()
            await self._task
            self._server = self._task = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config, connections: _Connections) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._leaving = asyncio.Event()
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
        """As uvicorn's, but returns with the last connection; uvicorn polls every tenth."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self._connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._connections.none.wait()
                await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Connections(set[Any]):
    """The open connections; `none` is set while there are none."""

    def __init__(self, max_connections: int, on_refusal: Callable[[], None]) -> None:
        super().__init__()
        self.none = asyncio.Event()
        self.none.set()
        self._max_connections = max_connections
        self._on_refusal = on_refusal

    def add(self, connection: Any) -> None:
        super().add(connection)
        self.none.clear()

    def admit(self) -> bool:
        if len(self) <= self._max_connections:
            return True
        self._on_refusal()
        return False

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        if not self:
            self.none.set()


def _bind(host: str, port: int, param: str, *, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay (40 ms an answer) off only for sockets declared as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port and port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}", param=param) from error
    listener.setblocking(False)
    return listener
