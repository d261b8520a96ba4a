"""Handshake, seals and frame layout of one connection, and such a connection on an event loop.

A frame is a head (payload length, kind, number), the payload and, after the handshake, a seal. Each
end proves that it knows the secret without sending it: HMAC-SHA256 over two fresh random numbers,
one from each end, with a label per direction. Seal keys come from the same numbers. A seal is keyed
BLAKE2b over the frame's position in the stream, head and payload: a frame cannot be changed,
dropped, repeated or moved to another connection. Nothing is encrypted.

    client                          server
    HELLO(random c)          ->
                             <-     HELLO(random s, proof of s)
    PROOF(proof of c)        ->
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from enum import IntEnum
from hashlib import blake2b, sha256
from typing import cast

_HEAD = struct.Struct("!IBQ")
HEAD_BYTES = _HEAD.size
MAX_PAYLOAD_BYTES = 256 << 20
#: Largest payload from a peer that has not proved the secret yet.
_MAX_HANDSHAKE_BYTES = 256
_POSITION = struct.Struct("!Q")
_SEAL_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
#: Of connections on an event loop.
_PURPOSE = b"control"
#: Options that notice a peer whose host is gone and therefore closes nothing.
_KEEPALIVE = (
    ("TCP_USER_TIMEOUT", 15_000),  # ms that sent data may stay unacknowledged
    ("TCP_KEEPIDLE", 10),  # s of idleness before the first probe
    ("TCP_KEEPINTVL", 5),  # s between probes
    ("TCP_KEEPCNT", 3),
)


class FrameError(ConnectionError):
    """The peer sent what it may not send. The connection cannot be used any more."""


class AuthenticationFailed(FrameError):
    """The peer does not know the secret."""


class HandshakeKind(IntEnum):
    """Kinds of the handshake's frames. Later frames use kinds of the protocol above."""

    HELLO = 0
    PROOF = 1


class _Sealer:
    """Computes the seals of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._position = 0

    def next_seal(self, head: bytes, payload: bytes) -> bytes:
        mac = blake2b(_POSITION.pack(self._position) + head, key=self._key, digest_size=_SEAL_BYTES)
        mac.update(payload)
        self._position += 1
        return mac.digest()


class Session:
    """One end of a connection. `purpose` keeps apart protocols that share a secret."""

    def __init__(self, secret: bytes, *, purpose: bytes, is_client: bool) -> None:
        # Hashed, because HMAC ignores zeros at the end of a key.
        self._secret = sha256(b"baton " + purpose + b" " + secret).digest()
        self._is_client = is_client
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._incoming: _Sealer | None = None
        self._outgoing: _Sealer | None = None

    @property
    def established(self) -> bool:
        """Whether the peer has proved the secret."""
        return self._incoming is not None

    def opening(self) -> bytes:
        """What this end sends first: a client its HELLO, a server nothing."""
        return self.frame(HandshakeKind.HELLO, 0, self._nonce) if self._is_client else b""

    def frame(self, kind: int, number: int, payload: bytes) -> bytes:
        head = _HEAD.pack(len(payload), kind, number)
        seal = b"" if self._outgoing is None else self._outgoing.next_seal(head, payload)
        return head + payload + seal

    def parse_head(self, head: bytes) -> tuple[int, int, int]:
        """Length of payload plus seal, kind and number of the next frame. Raises FrameError."""
        size, kind, number = _HEAD.unpack(head)
        if not self.established:
            if size > _MAX_HANDSHAKE_BYTES:
                raise FrameError(f"a handshake frame of {size} bytes is too long")
            return size, kind, number
        if size > MAX_PAYLOAD_BYTES:
            raise FrameError(f"a frame of {size} bytes is too long")
        return size + _SEAL_BYTES, kind, number

    def open(self, head: bytes, body: bytes) -> bytes:
        """The payload of a frame whose payload and seal are `body`. Raises FrameError."""
        assert self._incoming is not None, "before the handshake is over"
        payload, seal = body[:-_SEAL_BYTES], body[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._incoming.next_seal(head, payload)):
            raise FrameError("a frame has a wrong seal")
        return payload

    def handshake(self, kind: int, payload: bytes) -> bytes:
        """Take a frame of the handshake; what to send in reply. Raises AuthenticationFailed."""
        return self._verify_server(kind, payload) if self._is_client else self._serve(kind, payload)

    def _serve(self, kind: int, payload: bytes) -> bytes:
        if not self._peer_nonce and kind == HandshakeKind.HELLO and len(payload) == _NONCE_BYTES:
            self._peer_nonce = payload
            return self.frame(HandshakeKind.HELLO, 0, self._nonce + self._derive(b"server"))
        expected = self._derive(b"client")
        proved = kind == HandshakeKind.PROOF and hmac.compare_digest(payload, expected)
        if not self._peer_nonce or not proved:
            raise AuthenticationFailed("the client does not know the secret")
        self._incoming = _Sealer(self._derive(b"to server"))
        self._outgoing = _Sealer(self._derive(b"to client"))
        return b""

    def _verify_server(self, kind: int, payload: bytes) -> bytes:
        self._peer_nonce, proof = payload[:_NONCE_BYTES], payload[_NONCE_BYTES:]
        known = kind == HandshakeKind.HELLO and len(proof) == _PROOF_BYTES
        if not known or not hmac.compare_digest(proof, self._derive(b"server")):
            raise AuthenticationFailed("the server does not know the secret")
        reply = self.frame(HandshakeKind.PROOF, 0, self._derive(b"client"))
        self._outgoing = _Sealer(self._derive(b"to server"))
        self._incoming = _Sealer(self._derive(b"to client"))
        return reply

    def _derive(self, label: bytes) -> bytes:
        client, server = self._nonce, self._peer_nonce
        if not self._is_client:
            client, server = server, client
        return hmac.digest(self._secret, b"baton " + label + client + server, "sha256")


def enable_keepalive(connection: socket.socket) -> None:
    """Break the connection about 15 s (idle: 25 s) after the peer's host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
