"""A short way between two processes for calls and streams where a millisecond counts.

One TCP connection, frames of our own, nothing between the socket and the handler: a call, or an
item of a stream, takes a fraction of what it takes through gRPC, whose Python side hands every
message over between threads. The address comes over gRPC (service.ControlClient), which stays the
way of everything else.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from enum import IntEnum
from typing import cast

from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, ErrorInfo, Unavailable

#: Request bytes in, reply bytes out; raises BatonError only.
Answer = Callable[[bytes], Awaitable[bytes]]
#: Request bytes in, an item's bytes at a time out; raises BatonError only.
Items = Callable[[bytes], AsyncIterator[bytes]]

_HEAD = struct.Struct("!IBQ")  # length of what follows, kind, number of the call
_PATH = struct.Struct("!H")
_MAX_FRAME = 256 << 20
#: A peer whose host is gone does not close its end; what we send to it stays unacknowledged.
_DEAD_PEER_MS = 15_000


class _Kind(IntEnum):
    HELLO = 0
    CALL = 1
    CANCEL = 2
    REPLY = 3
    ERROR = 4
    STREAM = 5
    ITEM = 6
    END = 7


class _Connection(asyncio.Protocol, ABC):
    """Cuts the stream into frames."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its base classes.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        if peer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)

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

    def close(self) -> None:
        """Hang up after what is still to be sent."""
        if self._transport is not None:
            self._transport.close()

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
        self._writable = asyncio.Event()
        self._writable.set()

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

    def pause_writing(self) -> None:
        """The peer reads more slowly than we write: streams wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _Kind.HELLO:
            self._welcome = hmac.compare_digest(payload, self._server.secret)
        if not self._welcome:
            self.hang_up()
        elif kind in (_Kind.CALL, _Kind.STREAM):
            work = self._answer if kind == _Kind.CALL else self._stream
            task = asyncio.get_running_loop().create_task(work(number, payload))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        elif kind == _Kind.CANCEL and number in self._running:
            self._running[number].cancel()

    async def _answer(self, number: int, payload: bytes) -> None:
        path, request = _split(payload)
        try:
            if path not in self._server.answers:
                raise Unavailable(f"no method {path} here")
            reply = await self._server.answers[path](request)
        except BatonError as error:
            self.send(_Kind.ERROR, number, codec.encode(error.info()))
        else:
            self.send(_Kind.REPLY, number, reply)

    async def _stream(self, number: int, payload: bytes) -> None:
        path, request = _split(payload)
        try:
            if path not in self._server.streams:
                raise Unavailable(f"no stream {path} here")
            async with aclosing(self._server.streams[path](request)) as items:  # type: ignore[type-var]
                async for item in items:
                    self.send(_Kind.ITEM, number, item)
                    await self._writable.wait()
        except BatonError as error:
            self.send(_Kind.ERROR, number, codec.encode(error.info()))
        else:
            self.send(_Kind.END, number, b"")


def _split(payload: bytes) -> tuple[str, bytes]:
    """Path and request of a call."""
    size = int.from_bytes(payload[: _PATH.size], "big")
    path = payload[_PATH.size : _PATH.size + size].decode(errors="replace")
    return path, payload[_PATH.size + size :]


class QuickServer:
    """Answers calls and streams by path. A caller that gives up, or is gone, cancels its
    handler."""

    def __init__(
        self, answers: Mapping[str, Answer], streams: Mapping[str, Items], *, secret: bytes
    ) -> None:
        self.answers = answers
        self.streams = streams
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
        """Hang up on everybody, once what was sent to them is on its way."""
        self.stopped = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.close()


class QuickClient(_Connection):
    """The caller's end of one connection. Once broken it stays so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, _Incoming] = {}
        self.broken = False

    @classmethod
    async def connect(cls, host: str, port: int, *, name: str, secret: bytes) -> QuickClient:
        """`name` is what errors call the peer. Raises OSError when nobody listens there."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(name), host, port)
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
        self.send(_Kind.CALL, number, _joined(path, request))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(f"{path} at {self._where}: no answer in time") from None
        finally:
            del self._waiting[number]
            if not reply.done() or reply.cancelled():
                self.send(_Kind.CANCEL, number, b"")

    async def stream(self, path: str, request: bytes) -> AsyncIterator[bytes]:
        """Items until the peer ends the stream; closing the iterator cancels it. Raises the peer's
        typed error, or Unavailable when the connection breaks, after what came before."""
        if self.broken:
            raise Unavailable(f"{path} at {self._where}: not connected")
        number = next(self._numbers)
        incoming = self._streams[number] = _Incoming()
        self.send(_Kind.STREAM, number, _joined(path, request))
        try:
            async for item in incoming:
                yield item
        finally:
            del self._streams[number]
            if not incoming.ended:
                self.send(_Kind.CANCEL, number, b"")

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """A reply, or a part of a stream."""
        if number in self._streams:
            self._streams[number].frame(kind, payload)
            return
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
        for incoming in self._streams.values():
            incoming.end(Unavailable(f"{self._where}: the connection broke"))

    def close(self) -> None:
        """Hang up; calls and streams in flight fail."""
        self.hang_up()


class _Incoming:
    """The items of one stream, as they come; its end or error after them."""

    def __init__(self) -> None:
        self.ended = False
        self._items: deque[bytes] = deque()
        self._error: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    def frame(self, kind: int, payload: bytes) -> None:
        """An item, or the end."""
        if kind == _Kind.ITEM:
            self._items.append(payload)
            self._rouse()
        elif kind == _Kind.END:
            self.end(None)
        else:
            self.end(codec.decode(ErrorInfo, payload).to_error())

    def end(self, error: BatonError | None) -> None:
        """No more will come."""
        if not self.ended:
            self.ended, self._error = True, error
            self._rouse()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._items:
                yield self._items.popleft()
            elif self._error is not None:
                raise self._error
            elif self.ended:
                return
            else:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader

    def _rouse(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(path: str, request: bytes) -> bytes:
    name = path.encode()
    return _PATH.pack(len(name)) + name + request
