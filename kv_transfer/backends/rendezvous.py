"""How the two ends of a link find each other: the sender connects to a socket of the receiver's.

Both prove that they know the endpoint's token, which reached the sender over the control channel;
then the sender names the link, and waits until the receiver has accepted it. Data of a `tcp` link
flows over the same connection; `nccl` exchanges the name of a communicator over it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from framing.channel import Channel, ChannelClosed
from framing.ports import bind_free
from kv_transfer.backends.base import BlockLink, Link, LinkBroken, LinkId

L = TypeVar("L", bound=Link | BlockLink)
_PURPOSE = b"kv link"
_HANDSHAKE_S = 5.0
#: A connection that no link was accepted for is dropped after this time.
_UNCLAIMED_S = 60.0
_BACKLOG = 128
_ACCEPT_RETRY_S = 0.05


class Rendezvous:
    """The receiver's listening socket on `host`, which it advertises, and the senders that have
    connected. Safe from any thread."""

    def __init__(self, host: str, ports: str = "") -> None:
        self._host = host
        self._ports = ports
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._connected = threading.Condition()
        self._waiting: dict[str, tuple[Channel, float]] = {}

    def listen(self) -> str:
        """Listen on a free port, once; the endpoint for `connect`."""
        with self._connected:
            if self._listener is None:
                self._listener = self._open_listener()
            return f"{self._host}|{self._listener.getsockname()[1]}|{self._token}"

    def await_sender(self, link: LinkId, limit: float) -> Channel:
        """The connection of the sender of `link`. Raises LinkBroken at `limit` (monotonic)."""
        name = str(link)
        with self._connected:
            if self._listener is None:
                raise LinkBroken(f"link {name}: not listening")
            left = max(0.0, limit - time.monotonic())
            self._connected.wait_for(lambda: self._listener is None or name in self._waiting, left)
            if name not in self._waiting:
                raise LinkBroken(f"link {name}: the sender did not come")
            return self._waiting.pop(name)[0]

    def close(self) -> None:
        """Stop listening; close connections that no link was accepted for."""
        with self._connected:
            waiting, self._waiting = self._waiting, {}
            listener, self._listener = self._listener, None
            self._connected.notify_all()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for channel, _ in waiting.values():
            channel.close()

    def _open_listener(self) -> socket.socket:
        family = _family(self._host)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            bind_free(listener, self._host, self._ports)
            listener.listen(_BACKLOG)
            threading.Thread(
                target=self._accept_all, args=(listener,), name="kv-accept", daemon=True
            ).start()
        except (OSError, RuntimeError):  # the next call of `listen` may succeed
            listener.close()
            raise
        return listener

    def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                with self._connected:
                    if self._listener is not listener:
                        return
                time.sleep(_ACCEPT_RETRY_S)  # the sender is gone, or no file is left
                continue
            # A thread each: a silent connection must not hold up the next one.
            handshake = threading.Thread(
                target=self._authenticate, args=(connection,), name="kv-handshake", daemon=True
            )
            try:
                handshake.start()
            except RuntimeError:  # no thread is left
                connection.close()

    def _authenticate(self, connection: socket.socket) -> None:
        limit = time.monotonic() + _HANDSHAKE_S
        with contextlib.suppress(ChannelClosed):
            secret = self._token.encode()
            channel = Channel.server(connection, secret, purpose=_PURPOSE, limit=limit)
            self._put(channel.receive(limit).decode(errors="replace"), channel)

    def _put(self, name: str, channel: Channel) -> None:
        now = time.monotonic()
        with self._connected:
            old = [n for n, (_, since) in self._waiting.items() if now - since > _UNCLAIMED_S]
            dropped = [self._waiting.pop(n)[0] for n in {*old, name} & self._waiting.keys()]
            self._waiting[name] = (channel, now)
            self._connected.notify_all()
        for stale in dropped:
            stale.close()


class RendezvousBackend(Rendezvous, ABC, Generic[L]):
    """A backend whose links begin with a connection to a socket of the receiver's."""

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> L:
        limit = time.monotonic() + timeout_s
        channel = _connect(link, endpoint, limit)
        return self._build(link, channel, is_sender=True, limit=limit)

    def accept(self, link: LinkId, timeout_s: float) -> L:
        limit = time.monotonic() + timeout_s
        channel = self.await_sender(link, limit)
        try:
            channel.send(b"accepted", limit)
        except ChannelClosed as error:
            raise LinkBroken(f"link {link}: the sender is gone: {error}") from error
        return self._build(link, channel, is_sender=False, limit=limit)

    @abstractmethod
    def _build(self, link: LinkId, channel: Channel, *, is_sender: bool, limit: float) -> L:
        """One end of a link whose ends are connected by `channel`, which it owns. Raises LinkBroken
        at `limit` (monotonic) or before."""


def _connect(link: LinkId, endpoint: str, limit: float) -> Channel:
    """A channel to the endpoint's owner, which has accepted `link`. Raises LinkBroken."""
    try:
        host, port, token = endpoint.split("|")
        left = max(0.001, limit - time.monotonic())
        connection = socket.create_connection((host, int(port)), left)
        channel = Channel.client(connection, token.encode(), purpose=_PURPOSE, limit=limit)
        channel.send(str(link).encode(), limit)
        channel.receive(limit)
    except (OSError, ValueError, OverflowError) as error:
        raise LinkBroken(f"link {link}: cannot connect: {error}") from error
    return channel


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
