"""An authenticated connection on an asyncio event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import cast

from framing.keepalive import enable_keepalive
from framing.session import HEAD_BYTES, AuthenticationFailed, FrameError, Session

_PURPOSE = b"control"


class Connection(asyncio.Protocol, ABC):
    """One end: cuts the stream into frames, and aborts when a frame is not valid."""

    def __init__(self, secret: bytes, *, is_client: bool) -> None:
        self._session = Session(secret, purpose=_PURPOSE, is_client=is_client)
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    @abstractmethod
    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """Take a frame of an authenticated peer."""

    @property
    def authenticated(self) -> bool:
        """Whether the peer has proved that it knows the secret."""
        return self._session.established

    def send(self, kind: int, number: int, payload: bytes) -> None:
        """Send a frame; without a connection, nothing."""
        if self._transport is not None:
            self._transport.write(self._session.frame(kind, number, payload))

    def close(self) -> None:
        """Close the connection after what is still to be sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def handshake_ended(self, *, authenticated: bool) -> None:
        """The peer has proved the secret, or failed to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its base classes.
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            enable_keepalive(connection)
        if opening := self._session.opening():
            self._transport.write(opening)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= HEAD_BYTES and self._transport is not None:
                head = bytes(self._data[start : start + HEAD_BYTES])
                size, kind, number = self._session.parse_head(head)
                end = start + HEAD_BYTES + size
                if end > len(self._data):
                    break
                body = bytes(self._data[start + HEAD_BYTES : end])
                start = end
                self._take(head, kind, number, body)
        except FrameError as error:
            self.abort()
            if isinstance(error, AuthenticationFailed):
                self.handshake_ended(authenticated=False)
        del self._data[:start]

    def _take(self, head: bytes, kind: int, number: int, body: bytes) -> None:
        if self._session.established:
            self.frame(kind, number, self._session.open(head, body))
            return
        reply = self._session.handshake(kind, body)
        if self._transport is not None and reply:
            self._transport.write(reply)
        if self.authenticated:
            self.handshake_ended(authenticated=True)
