"""Framed, mutually authenticated byte messages between rank 0 and one follower."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading

_NONCE = 32
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE = 1 << 28


class ChannelClosed(ConnectionError):
    """The peer is gone, silent for too long, or not who it should be."""


class Channel:
    """One connection. `send` may come from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, *, timeout_s: float | None) -> None:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send one message. Raises ChannelClosed."""
        if len(message) > _MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes is too long")
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise ChannelClosed(f"cannot send: {error}") from error

    def receive(self) -> bytes:
        """The next message. Raises ChannelClosed, also after `timeout_s` of silence."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MAX_MESSAGE:
            raise ChannelClosed(f"a message of {length} bytes is too long")
        return self._exactly(length)

    def close(self) -> None:
        """Close both directions; wakes a blocked `receive`."""
        with contextlib.suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except OSError as error:
                raise ChannelClosed(f"cannot receive: {error}") from error
            if not part:
                raise ChannelClosed("the peer closed the connection")
            data += part
        return bytes(data)


def _proof(key: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, who + b"".join(parts), hashlib.sha256).digest()


def greet(channel: Channel, key: bytes, rank: int) -> None:
    """The follower's side of the handshake: prove the key, check that rank 0 has it too."""
    theirs, mine = channel.receive(), secrets.token_bytes(_NONCE)
    name = _LENGTH.pack(rank)
    channel.send(name + mine + _proof(key, b"follower", name, theirs, mine))
    if not hmac.compare_digest(channel.receive(), _proof(key, b"leader", mine, theirs)):
        raise ChannelClosed("the other side does not know the key")


def welcome(channel: Channel, key: bytes) -> int:
    """Rank 0's side of the handshake; the follower's rank. Raises ChannelClosed."""
    mine = secrets.token_bytes(_NONCE)
    channel.send(mine)
    answer = channel.receive()
    name, theirs = answer[: _LENGTH.size], answer[_LENGTH.size : _LENGTH.size + _NONCE]
    proof = answer[_LENGTH.size + _NONCE :]
    if not hmac.compare_digest(proof, _proof(key, b"follower", name, mine, theirs)):
        raise ChannelClosed("the other side does not know the key")
    channel.send(_proof(key, b"leader", theirs, mine))
    return int(_LENGTH.unpack(name)[0])
