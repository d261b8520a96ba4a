"""A small HTTP/1.1 client that notes when each piece of a streamed answer arrives.

It shares its cores with the server it measures, so it does nothing while tokens arrive but keep the
bytes and the time; they are read when the answer is complete.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from cluster.client_tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete response: its status and body pieces; times are of time.perf_counter."""

    status: int
    sent: float
    ended: float
    pieces: tuple[tuple[float, bytes], ...]

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def events(self) -> list[tuple[float, str]]:
        """The `data:` lines of a server-sent event stream, each with its arrival time."""
        found: list[tuple[float, str]] = []
        rest = b""
        for when, data in self.pieces:
            *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in whole:
                lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
                found.extend((when, line[5:].strip().decode()) for line in lines)
        return found


def to_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


@dataclass(slots=True)
class _Exchange:
    done: asyncio.Future[None]
    status: int = 0
    keep_alive: bool = True
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


class HttpClientConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time; made again when the server closed it."""

    def __init__(
        self, url: str, headers: dict[str, str] | None = None, tls: ClientTls | None = None
    ) -> None:
        """An https:// URL is called with `tls`, or else trusting the usual CAs."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._port = parts.port or 443
            self._tls = tls.context if tls else ssl.create_default_context()
        self._prefix = parts.path.rstrip("/")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._exchange: _Exchange | None = None

    async def post(self, path: str, body: dict[str, Any] | bytes, *, timeout_s: float) -> Answer:
        """Send `body`, JSON or what becomes it; the answer when it is complete.

        Raises TimeoutError, or OSError when the connection cannot be made or breaks.
        """
        payload = body if isinstance(body, bytes) else to_json(body)
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            f"{self._headers}\r\n"
        )
        return await self._send(head.encode() + payload, timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        """A GET; the answer when it is complete."""
        head = f"GET {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        return await self._send(f"{head}{self._headers}\r\n".encode(), timeout_s)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _send(self, data: bytes, timeout_s: float) -> Answer:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            if self._transport is None or self._transport.is_closing():
                await loop.create_connection(lambda: self, self._host, self._port, ssl=self._tls)
            assert self._transport is not None
            exchange = self._exchange = _Exchange(loop.create_future())
            sent = time.perf_counter()
            self._transport.write(data)
            try:
                await exchange.done
            except BaseException:
                self.close()
                raise
            finally:
                self._exchange = None
        ended = exchange.pieces[-1][0] if exchange.pieces else time.perf_counter()
        if not exchange.keep_alive:
            self.close()
        return Answer(status=exchange.status, sent=sent, ended=ended, pieces=tuple(exchange.pieces))

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A fresh connection, a fresh parser."""
        # uvloop's transports have asyncio's methods but not its base classes.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer under way is lost with its connection."""
        self._transport = None
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._exchange is not None and not self._exchange.done.done():
            self._exchange.done.set_exception(error)

    # --- httptools --------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """The status line and headers are in."""
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()
            self._exchange.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """One piece of the body, as it came over the wire."""
        if self._exchange is not None:
            self._exchange.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._exchange is not None and not self._exchange.done.done():
            self._exchange.done.set_result(None)
