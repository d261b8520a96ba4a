"""A short way between two processes for the few calls where a millisecond counts.

One TCP connection, frames of our own, nothing between the socket and the handler: a call takes a
fraction of what it takes through gRPC, whose Python side hands every message over between threads.
The address comes over gRPC (service.ControlClient), which stays the way of everything else.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import cast

from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, ErrorInfo, Internal, Unavailable

#: Request bytes in, reply bytes out; raises BatonError only.
Answer = Callable[[bytes], Awaitable[bytes]]

_HEAD = struct.Struct("!IBQ")  # length of what follows, kind, number of the call
_PATH = struct.Struct("!H")
_MAX_FRAME = 256 << 20


class _Kind(IntEnum):
    HELLO = 0
    CALL = 1
    CANCEL = 2
    REPLY = 3
    ERROR = 4


class _Connection(asyncio.Protocol, ABC):
    """Cuts the stream into frames."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its base classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        while len(self._data) - start >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(self._data, start)
            if size > _MAX_FRAME:
                self.hang_up()
                return
            end = start + _HEAD.size + size
            if end > len(self._data):
                break
            payload = bytes(self._data[start + _HEAD.size : end])
            start = end
            self.frame(kind, number, payload)
        del self._data[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def send(self, kind: _Kind, number: int, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(payload), kind, number) + payload)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @abstractmethod
    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """One came."""


class _ServerConnection(_Connection):
    def __init__(self, server: QuickServer) -> None:
        super().__init__()
        self._server = server
        self._welcome = False
        self._running: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        if self._server.stopped:  # it came while the door closed
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.connections.discard(self)
        for task in self._running.values():
            task.cancel()

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _Kind.HELLO:
            self._welcome = hmac.compare_digest(payload, self._server.secret)
        if not self._welcome:
            self.hang_up()
        elif kind == _Kind.CALL:
            task = asyncio.get_running_loop().create_task(self._answer(number, payload))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif kind == _Kind.CANCEL and number in self._running:
            self._running[number].cancel()

    async def _answer(self, number: int, payload: bytes) -> None:
        size = int.from_bytes(payload[: _PATH.size], "big")
        path = payload[_PATH.size : _PATH.size + size].decode(errors="replace")
        handler = self._server.handlers.get(path)
        try:
            if handler is None:
                raise Internal(f"no method {path} here")
            reply = await handler(payload[_PATH.size + size :])
        except BatonError as error:
            self.send(_Kind.ERROR, number, codec.encode(error.info()))
        else:
            self.send(_Kind.REPLY, number, reply)


class QuickServer:
    """Answers calls by path. A caller that gives up, or is gone, cancels its handler."""

    def __init__(self, handlers: Mapping[str, Answer], *, secret: bytes) -> None:
        self.handlers = handlers
        self.secret = secret
        self.connections: set[_ServerConnection] = set()
        self.stopped = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`; the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ServerConnection(self), host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Hang up on everybody."""
        self.stopped = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.hang_up()


class QuickClient(_Connection):
    """The caller's end of one connection. Once broken it stays so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.broken = False

    @classmethod
    async def connect(cls, host: str, port: int, *, secret: bytes) -> QuickClient:
        """Raises OSError when nobody listens there."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(f"{host}:{port}"), host, port)
        client.send(_Kind.HELLO, 0, secret)
        return client

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """One reply. Raises the peer's typed error, Unavailable when the connection breaks, or
        DeadlineExceeded."""
        if self.broken:
            raise Unavailable(f"{path} at {self._where}: not connected")
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        name = path.encode()
        self.send(_Kind.CALL, number, _PATH.pack(len(name)) + name + request)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(f"{path} at {self._where}: no answer in time") from None
        finally:
            del self._waiting[number]
            if not reply.done() or reply.cancelled():
                self.send(_Kind.CANCEL, number, b"")

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """A reply."""
        reply = self._waiting.get(number)
        if reply is None or reply.done():
            return
        if kind == _Kind.REPLY:
            reply.set_result(payload)
        else:
            reply.set_exception(codec.decode(ErrorInfo, payload).to_error())

    def connection_lost(self, exc: Exception | None) -> None:
        """Calls in flight fail."""
        super().connection_lost(exc)
        self.broken = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Unavailable(f"{self._where}: the connection broke"))

    def close(self) -> None:
        """Hang up; calls in flight fail."""
        self.hang_up()
