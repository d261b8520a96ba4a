"""The caller's end of a connection: calls and streams in flight, by number."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import deque
from collections.abc import AsyncIterator

from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, ErrorInfo, Unauthenticated, Unavailable
from rpc.frames import TAKEN_ITEMS, ClientEnd, FrameKind

_PATH = struct.Struct("!H")


class ClientLink(ClientEnd):
    """Once broken it stays so. `where` is what errors call the peer."""

    def __init__(self, where: str, secret: bytes) -> None:
        super().__init__(secret)
        self._where = where
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, _Incoming] = {}
        self.broken = False

    @classmethod
    async def connect(cls, address: str, *, secret: bytes) -> ClientLink:
        """Raises OSError when nobody listens at `host:port` or hangs up, Unauthenticated when who
        does cannot show that it knows the secret."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(
            lambda: cls(address, secret), host.strip("[]"), int(port)
        )
        try:
            known = await link.meeting
        except BaseException:
            link.hang_up()
            raise
        if known is None:
            raise ConnectionResetError("the peer hung up")
        if not known:
            raise Unauthenticated(f"{address} does not know the secret of this cluster")
        return link

    async def call(self, path: str, request: bytes, limit: float) -> bytes:
        """One reply; cancelling this cancels the call. Raises the peer's typed error, Unavailable
        when the connection breaks, DeadlineExceeded at `limit` (the loop's time)."""
        if self.broken:
            raise Unavailable(f"{path} at {self._where}: not connected")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = reply
        self.send(FrameKind.CALL, number, joined(path, request))
        timer = loop.call_at(limit, self._give_up, number, path)
        try:
            return await reply
        finally:
            timer.cancel()
            del self._waiting[number]
            if not reply.done() or reply.cancelled():
                self.send(FrameKind.CANCEL, number, b"")

    def _give_up(self, number: int, path: str) -> None:
        reply = self._waiting[number]
        if not reply.done():
            reply.set_exception(DeadlineExceeded(f"{path} at {self._where}: no answer in time"))
            self.send(FrameKind.CANCEL, number, b"")

    async def stream(self, path: str, request: bytes) -> AsyncIterator[bytes]:
        """Items until the peer ends the stream; closing the iterator cancels it. Raises the peer's
        typed error, or Unavailable when the connection breaks, after what came before."""
        if self.broken:
            raise Unavailable(f"{path} at {self._where}: not connected")
        number = next(self._numbers)
        incoming = self._streams[number] = _Incoming()
        self.send(FrameKind.STREAM, number, joined(path, request))
        try:
            taken = 0
            async for item in incoming:
                yield item
                taken += 1
                if taken % TAKEN_ITEMS == 0:
                    self.send(FrameKind.TAKEN, number, b"")
        finally:
            del self._streams[number]
            if not incoming.ended:
                self.send(FrameKind.CANCEL, number, b"")

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """A reply, or a part of a stream."""
        if number in self._streams:
            self._streams[number].frame(kind, payload)
            return
        reply = self._waiting.get(number)
        if reply is None or reply.done():
            return
        if kind == FrameKind.REPLY:
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


class _Incoming:
    """The items of one stream, as they come; its end or error after them."""

    def __init__(self) -> None:
        self.ended = False
        self._items: deque[bytes] = deque()
        self._error: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    def frame(self, kind: int, payload: bytes) -> None:
        """An item, or the end."""
        if kind == FrameKind.ITEM:
            self._items.append(payload)
            self._rouse()
        elif kind == FrameKind.END:
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


def joined(path: str, request: bytes) -> bytes:
    """The payload of a call."""
    name = path.encode()
    return _PATH.pack(len(name)) + name + request


def split(payload: bytes) -> tuple[str, bytes]:
    """Path and request of a call."""
    size = int.from_bytes(payload[: _PATH.size], "big")
    path = payload[_PATH.size : _PATH.size + size].decode(errors="replace")
    return path, payload[_PATH.size + size :]
