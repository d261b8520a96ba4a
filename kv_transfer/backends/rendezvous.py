"""Where the two ends of a link meet before there is a link: one short TCP conversation per link.

torch's TCPStore would do as well, but its server looks up the name of every caller and stalls for
seconds, for all of them, when the name server is slow; and it answers on every interface. Here the
receiver listens on one address, the sender says which link it comes for and shows the token of the
endpoint, and the socket then carries the few keys that a process group exchanges when it is built.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Generic, TypeVar

from torch._C._distributed_c10d import Store

from kv_transfer.backends.base import BlockLink, Link, LinkBroken, LinkId

L = TypeVar("L", bound=Link | BlockLink)
SENDER, RECEIVER = 0, 1
_HELLO = struct.Struct("!HH")  # lengths of token and link name
_FRAME = struct.Struct("!II")  # lengths of key and value
_HELLO_TIMEOUT_S = 5.0
_UNCLAIMED_S = 60.0
_MAX_FRAME = 1 << 20
_BACKLOG = 128
_PAUSE_S = 0.05


class SocketStore(Store):
    """The keys of one link's group: what one end sets, the other reads. One thread at a time.

    Errors are RuntimeErrors, as torch's own stores raise them.
    """

    def __init__(self, connection: socket.socket, limit: float) -> None:
        super().__init__()
        self._connection = connection
        self._limit = limit
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value and send it to the other end."""
        data = value.encode() if isinstance(value, str) else value
        self._values[key] = data
        name = key.encode()
        _wait_at_most(self._connection, self._limit)
        self._connection.sendall(_FRAME.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """A value of either end; waits for it until the link's time is up."""
        self._read_until([key], self._limit)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there."""
        limit = self._limit
        if timeout is not None:
            limit = min(limit, time.monotonic() + timeout.total_seconds())
        self._read_until(keys, limit)

    def _read_until(self, keys: list[str], limit: float) -> None:
        while not all(key in self._values for key in keys):
            key_size, value_size = _FRAME.unpack(_read(self._connection, _FRAME.size, limit))
            if key_size + value_size > _MAX_FRAME:
                raise RuntimeError("the other end does not speak the link's language")
            data = _read(self._connection, key_size + value_size, limit)
            self._values[data[:key_size].decode()] = data[key_size:]


class Rendezvous:
    """The receiver's listening socket on `host`, and the senders that came and were not yet asked
    for. Safe from any thread."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._arrived = threading.Condition()
        self._waiting: dict[str, tuple[socket.socket, float]] = {}

    def listen(self) -> str:
        """Listen on a free port, once; the endpoint for `call`."""
        with self._arrived:
            if self._listener is None:
                self._listener = self._begin()
            return f"{self._host}|{self._listener.getsockname()[1]}|{self._token}"

    def _begin(self) -> socket.socket:
        listener = socket.socket(_family(self._host))
        try:
            listener.bind((self._host, 0))
            listener.listen(_BACKLOG)
            threading.Thread(
                target=self._take_calls, args=(listener,), name="kv-meet", daemon=True
            ).start()
        except (OSError, RuntimeError):  # the next one that asks may fare better
            listener.close()
            raise
        return listener

    def await_sender(self, link: LinkId, limit: float) -> socket.socket:
        """The connection of the sender of `link`. Raises LinkBroken when none came."""
        name = str(link)
        with self._arrived:
            if self._listener is None:
                raise LinkBroken(f"link {name}: not listening")
            left = max(0.0, limit - time.monotonic())
            self._arrived.wait_for(lambda: self._listener is None or name in self._waiting, left)
            if name not in self._waiting:
                raise LinkBroken(f"link {name}: the sender did not come")
            return self._waiting.pop(name)[0]

    def close(self) -> None:
        """Stop listening, and hang up on those who still wait."""
        with self._arrived:
            waiting, self._waiting = self._waiting, {}
            listener, self._listener = self._listener, None
            self._arrived.notify_all()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection, _ in waiting.values():
            connection.close()

    def _take_calls(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                with self._arrived:
                    if self._listener is not listener:
                        return
                time.sleep(_PAUSE_S)  # the caller has gone, or this process has no file left
                continue
            # A caller that says nothing must not keep the next one out.
            greeting = threading.Thread(
                target=self._greet, args=(connection,), name="kv-greet", daemon=True
            )
            try:
                greeting.start()
            except RuntimeError:  # this process has no thread left
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        limit = time.monotonic() + _HELLO_TIMEOUT_S  # for all of it, however slowly it comes
        try:
            token_size, name_size = _HELLO.unpack(_read(connection, _HELLO.size, limit))
            token = _read(connection, token_size, limit)
            name = _read(connection, name_size, limit).decode()
        except (OSError, RuntimeError, ValueError):
            connection.close()
            return
        if not hmac.compare_digest(token, self._token.encode()):
            connection.close()
            return
        self._put(name, connection)

    def _put(self, name: str, connection: socket.socket) -> None:
        now = time.monotonic()
        with self._arrived:
            old = [n for n, (_, since) in self._waiting.items() if now - since > _UNCLAIMED_S]
            dropped = [self._waiting.pop(n)[0] for n in {*old, name} & self._waiting.keys()]
            self._waiting[name] = (connection, now)
            self._arrived.notify_all()
        for stale in dropped:
            stale.close()


class RendezvousBackend(ABC, Generic[L]):
    """A backend whose links are built by two ends that meet at a socket of the receiver's. `host`
    is the address to listen on and to advertise."""

    def __init__(self, host: str) -> None:
        self._meeting = Rendezvous(host)

    def listen(self) -> str:
        """Listen on a free port of `host`, once."""
        return self._meeting.listen()

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> L:
        """Meet the receiver at its endpoint."""
        limit = time.monotonic() + timeout_s
        return self._build(link, call(endpoint, link, limit), SENDER, limit)

    def accept(self, link: LinkId, timeout_s: float) -> L:
        """Wait for the sender."""
        limit = time.monotonic() + timeout_s
        return self._build(link, self._meeting.await_sender(link, limit), RECEIVER, limit)

    def close(self) -> None:
        """Stop listening."""
        self._meeting.close()

    @abstractmethod
    def _build(self, link: LinkId, connection: socket.socket, me: int, limit: float) -> L:
        """The end `me` (SENDER, RECEIVER) of a link over a connection of the two, to be closed
        then. Raises LinkBroken at `limit` (monotonic) or before."""


def call(endpoint: str, link: LinkId, limit: float) -> socket.socket:
    """The sender's end: a connection to the endpoint's owner. Raises LinkBroken."""
    name = str(link).encode()
    try:
        host, port, token = endpoint.split("|")
        left = max(0.001, limit - time.monotonic())
        connection = socket.create_connection((host, int(port)), left)
        try:
            connection.sendall(_HELLO.pack(len(token), len(name)) + token.encode() + name)
        except OSError:
            connection.close()
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise LinkBroken(f"link {link}: cannot connect: {error}") from error
    return connection


def _wait_at_most(connection: socket.socket, limit: float) -> None:
    connection.settimeout(max(0.001, limit - time.monotonic()))


def _read(connection: socket.socket, size: int, limit: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait_at_most(connection, limit)
        part = connection.recv(size - len(data))
        if not part:
            raise RuntimeError("the other end hung up")
        data += part
    return bytes(data)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
