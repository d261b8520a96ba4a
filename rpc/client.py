"""Clients of control methods: one connection per peer, many calls and streams on it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from framing.session import Connection
from protocol import codec
from protocol.errors import BatonError, DeadlineExceeded, ErrorInfo, Unauthenticated, Unavailable
from rpc.methods import ITEMS_PER_REPORT, FrameKind, Method, Rep, Req, pack_call

#: Time to connect for a stream.
_CONNECT_S = 5.0


class ControlClient:
    """Calls control methods of one peer. Connects on first use and again after a loss."""

    def __init__(self, address: str, *, secret: bytes) -> None:
        self.address = address
        self._secret = secret
        self._connection: _ServerConnection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def call(self, method: Method[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        """One reply. Raises the peer's typed error; Unavailable when it cannot be reached (naming
        `address` when nothing listens there); Unauthenticated when it does not know the secret;
        DeadlineExceeded after `timeout_s` seconds."""
        limit = asyncio.get_running_loop().time() + timeout_s
        connection = self._connection
        if connection is None or connection.lost:
            async with _replied_by(limit, f"{method.path} at {self.address}"):
                connection = await self._connected()
        reply = await connection.call(method.path, codec.encode(request), limit)
        return codec.decode(method.reply, reply)

    async def stream(self, method: Method[Req, Rep], request: Req) -> AsyncIterator[Rep]:
        """Replies until the peer ends the stream; closing the iterator cancels it. Raises as `call`
        does."""
        limit = asyncio.get_running_loop().time() + _CONNECT_S
        async with _replied_by(limit, self.address):
            connection = await self._connected()
        items = connection.stream(method.path, codec.encode(request))
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                yield codec.decode(method.reply, item)

    async def close(self) -> None:
        """Close the connection; calls and streams in flight fail."""
        self._closed = True
        if self._connection is not None:
            self._connection.abort()

    @property
    def unused(self) -> bool:
        """Whether there is no connection, and none is being made."""
        connected = self._connection is not None and not self._connection.lost
        return not connected and not self._connecting.locked()

    async def _connected(self) -> _ServerConnection:
        """The connection; one caller makes it while the others wait."""
        async with self._connecting:
            if self._connection is not None and not self._connection.lost:
                return self._connection
            self._check_open()
            try:
                connection = await _ServerConnection.connect(self.address, secret=self._secret)
            except (OSError, ValueError, OverflowError) as error:
                # Other OSErrors may be for want of files, ports or a network on this side.
                absent = not isinstance(error, OSError) or isinstance(error, ConnectionError)
                text, field = f"{self.address}: cannot connect: {error}", "address"
                raise Unavailable(text, param=field if absent else None) from error
            if self._closed:
                connection.abort()
            self._check_open()  # it may have been closed meanwhile
            self._connection = connection
            return connection

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.address}: the connection was closed")


class ClientPool:
    """One ControlClient per address, made on first use and dropped after its peer has closed the
    connection: ask for it anew for each call."""

    def __init__(self, *, secret: bytes) -> None:
        self._secret = secret
        self._clients: dict[str, ControlClient] = {}

    def get(self, address: str) -> ControlClient:
        client = self._clients.get(address)
        if client is None:
            self._clients = {at: kept for at, kept in self._clients.items() if not kept.unused}
            client = self._clients[address] = ControlClient(address, secret=self._secret)
        return client

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients))


@asynccontextmanager
async def _replied_by(limit: float, what: str) -> AsyncIterator[None]:
    """End the block with DeadlineExceeded at `limit` (the loop's time)."""
    try:
        async with asyncio.timeout_at(limit):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: no answer in time") from None


class _ServerConnection(Connection):
    """Calls and streams in flight, by number. Once `lost` it stays so."""

    def __init__(self, address: str, secret: bytes) -> None:
        super().__init__(secret, is_client=True)
        self.lost = False
        #: Whether the server knows the secret; None when it closed the connection before.
        self.handshake: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._address = address
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, _Items] = {}

    @classmethod
    async def connect(cls, address: str, *, secret: bytes) -> _ServerConnection:
        """Raises OSError when nothing listens at `host:port` or the peer closes the connection,
        Unauthenticated when it cannot prove the secret."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(address, secret), host.strip("[]"), int(port)
        )
        try:
            known = await connection.handshake
        except BaseException:
            connection.abort()
            raise
        if known is None:
            raise ConnectionResetError("the peer closed the connection")
        if not known:
            raise Unauthenticated(f"{address} does not know the secret of this cluster")
        return connection

    async def call(self, path: str, request: bytes, limit: float) -> bytes:
        """One reply; cancelling this cancels the call. Raises the peer's typed error, Unavailable
        when the connection breaks, DeadlineExceeded at `limit` (the loop's time)."""
        self._check_connected(path)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bytes] = loop.create_future()
        self._replies[number] = reply
        self.send(FrameKind.CALL, number, pack_call(path, request))
        timer = loop.call_at(limit, self._expire, number, path)
        try:
            return await reply
        finally:
            timer.cancel()
            del self._replies[number]
            if not reply.done() or reply.cancelled():
                self.send(FrameKind.CANCEL, number, b"")

    async def stream(self, path: str, request: bytes) -> AsyncIterator[bytes]:
        """Items until the peer ends the stream; closing the iterator cancels it. Raises the peer's
        typed error, or Unavailable when the connection breaks, after the items that came before."""
        self._check_connected(path)
        number = next(self._numbers)
        items = self._streams[number] = _Items()
        self.send(FrameKind.STREAM, number, pack_call(path, request))
        try:
            num_read = 0
            async for item in items:
                yield item
                num_read += 1
                if num_read % ITEMS_PER_REPORT == 0:
                    self.send(FrameKind.ITEMS_READ, number, b"")
        finally:
            del self._streams[number]
            if not items.ended:
                self.send(FrameKind.CANCEL, number, b"")

    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """Take a reply, or a part of a stream."""
        if number in self._streams:
            self._streams[number].frame(kind, payload)
            return
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if kind == FrameKind.REPLY:
            reply.set_result(payload)
        else:
            reply.set_exception(codec.decode(ErrorInfo, payload).to_error())

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the calls and streams in flight."""
        super().connection_lost(exc)
        self.lost = True
        self._resolve(None)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(Unavailable(f"{self._address}: the connection broke"))
        for items in self._streams.values():
            items.end(Unavailable(f"{self._address}: the connection broke"))

    def handshake_ended(self, *, authenticated: bool) -> None:
        """Let `connect` go on."""
        self._resolve(authenticated)

    def _resolve(self, known: bool | None) -> None:
        if not self.handshake.done():
            self.handshake.set_result(known)

    def _check_connected(self, path: str) -> None:
        if self.lost:
            raise Unavailable(f"{path} at {self._address}: not connected")

    def _expire(self, number: int, path: str) -> None:
        reply = self._replies[number]
        if not reply.done():
            reply.set_exception(DeadlineExceeded(f"{path} at {self._address}: no answer in time"))
            self.send(FrameKind.CANCEL, number, b"")


class _Items:
    """The items of one stream as they come, then its end or error."""

    def __init__(self) -> None:
        self.ended = False
        self._items: deque[bytes] = deque()
        self._error: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None

    def frame(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.ITEM:
            self._items.append(payload)
            self._wake()
        elif kind == FrameKind.END:
            self.end(None)
        else:
            self.end(codec.decode(ErrorInfo, payload).to_error())

    def end(self, error: BatonError | None) -> None:
        """End the stream after the items that came."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

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

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
