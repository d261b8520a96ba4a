"""An authenticated connection with blocking calls."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

from framing.session import HEAD_BYTES, MAX_PAYLOAD_BYTES, FrameError, Session, enable_keepalive

_MESSAGE, _BULK = 2, 3
_SIZE = struct.Struct("!Q")


class ChannelClosed(ConnectionError):
    """The connection is closed: by an end, by a deadline, or because the peer broke the rules."""


class Channel:
    """One connection. `send` may be called from any thread, `receive` from one at a time.

    `limit` is a time.monotonic() by which a whole message must have passed; None sets no limit. A
    call that fails closes the channel, because later bytes could belong to its message.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(connection)
        self._socket = connection
        self._session = session
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    @classmethod
    def client(
        cls, connection: socket.socket, secret: bytes, *, purpose: bytes, limit: float
    ) -> Channel:
        """The end that connected. Owns the socket; raises ChannelClosed."""
        return cls._established(connection, Session(secret, purpose=purpose, is_client=True), limit)

    @classmethod
    def server(
        cls, connection: socket.socket, secret: bytes, *, purpose: bytes, limit: float
    ) -> Channel:
        """The end that accepted. Owns the socket; raises ChannelClosed."""
        session = Session(secret, purpose=purpose, is_client=False)
        return cls._established(connection, session, limit)

    @classmethod
    def _established(cls, connection: socket.socket, session: Session, limit: float) -> Channel:
        try:
            channel = cls(connection, session)
        except OSError as error:  # the peer is gone already
            connection.close()
            raise ChannelClosed(f"cannot use the connection: {error}") from error
        with channel._closed_on_error():
            channel._write(session.opening(), limit)
            while not session.established:
                head = channel._read(HEAD_BYTES, limit)
                size, kind, _ = session.parse_head(head)
                channel._write(session.handshake(kind, channel._read(size, limit)), limit)
        return channel

    def send(self, message: bytes, limit: float | None = None) -> None:
        """Send one message. Raises ChannelClosed."""
        if len(message) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long")
        with self._sending, self._closed_on_error():
            self._write(self._session.frame(_MESSAGE, 0, message), limit)

    def receive(self, limit: float | None = None) -> bytes:
        """The next message. Raises ChannelClosed."""
        with self._closed_on_error():
            return self._receive(_MESSAGE, limit)

    def wait_readable(self) -> None:
        """Wait for the first byte of the next message. Raises ChannelClosed."""
        with self._closed_on_error():
            _wait(self._readable, None)

    def send_bulk(self, data: memoryview, limit: float) -> None:
        """Send bytes without a seal of their own: their number is sealed. Raises ChannelClosed."""
        with self._sending, self._closed_on_error():
            self._write(self._session.frame(_BULK, 0, _SIZE.pack(data.nbytes)), limit)
            self._write(data, limit)

    def receive_bulk(self, data: memoryview, limit: float) -> None:
        """Fill `data` with what the peer's `send_bulk` sends, which must have the same size. Raises
        ChannelClosed; `data` is untouched when the sizes differ."""
        with self._closed_on_error():
            (size,) = _SIZE.unpack(self._receive(_BULK, limit))
            if size != data.nbytes:
                raise FrameError(f"the peer sends {size} bytes, {data.nbytes} are expected")
            self._read_into(data, limit)

    def close(self) -> None:
        """Close both directions; blocked calls fail. Idempotent, from any thread."""
        with contextlib.suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed:
            self.close()
            raise
        except (OSError, struct.error, ValueError) as error:
            self.close()
            raise ChannelClosed(str(error)) from error

    def _receive(self, kind: int, limit: float | None) -> bytes:
        head = self._read(HEAD_BYTES, limit)
        size, found, _ = self._session.parse_head(head)
        payload = self._session.open(head, self._read(size, limit))
        if found != kind:
            raise FrameError(f"a frame of kind {found}, expected {kind}")
        return payload

    def _read(self, size: int, limit: float | None) -> bytes:
        data = bytearray(size)
        self._read_into(memoryview(data), limit)
        return bytes(data)

    def _read_into(self, data: memoryview, limit: float | None) -> None:
        while data:
            try:
                count = self._socket.recv_into(data)
            except BlockingIOError:
                _wait(self._readable, limit)
                continue
            if not count:
                raise ChannelClosed("the peer closed the connection")
            data = data[count:]

    def _write(self, data: bytes | memoryview, limit: float | None) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                _wait(self._writable, limit)


def _wait(poll: select.poll, limit: float | None) -> None:
    """Until the socket is ready or broken. Raises ChannelClosed at `limit`."""
    left_ms = None if limit is None else max(0.0, limit - time.monotonic()) * 1000
    if not poll.poll(left_ms):
        raise ChannelClosed("timed out")
