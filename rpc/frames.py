"""One TCP connection between two processes of a cluster: frames, and the proof of who is there.

A frame is a head (length, kind, number of the call), a payload, and from the handshake on a tag.
Each end shows that it knows the cluster's secret without sending it: HMAC-SHA256 over two fresh
random numbers, one of either end, under a label for each direction. Keys for the tags come from the
same, so a tag (keyed BLAKE2b over a frame's place in the stream, head and payload) says that the
peer sent this frame, now, as number so-and-so: nothing can be changed, dropped, repeated or brought
in from another connection. It does not hide anything.
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

_HEAD = struct.Struct("!IBQ")  # length of the payload, kind, number of the call
_PLACE = struct.Struct("!Q")
_TAG_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_PAYLOAD = 256 << 20
#: Of a peer that has not shown yet who it is.
_MAX_GREETING = 256
#: A peer whose host is gone does not close its end: what we send to it stays unacknowledged, and
#: where nothing is sent the system asks.
_DEAD_PEER_MS = 15_000
_ASK_AFTER_S = 10
_ASK_EVERY_S = 5
_ASK_TIMES = 3
#: Items of a stream that may be on their way. The system takes in minutes of them for a process
#: that is frozen; this is how its peer notices.
STREAM_ITEMS = 128
TAKEN_ITEMS = 32


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 0  # a random number; of the server, with its proof behind
    PROOF = 1  # of the client
    CALL = 2
    STREAM = 3
    CANCEL = 4
    REPLY = 5
    ERROR = 6
    ITEM = 7
    END = 8
    TAKEN = 9  # by who reads a stream: TAKEN_ITEMS more of them


class _Seal:
    """Makes or checks the tags of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0

    def tag(self, head: bytes, payload: bytes) -> bytes:
        """Of the next frame."""
        mac = blake2b(_PLACE.pack(self._place) + head, key=self._key, digest_size=_TAG_BYTES)
        mac.update(payload)
        self._place += 1
        return mac.digest()


class Connection(asyncio.Protocol, ABC):
    """One end: cuts the stream into frames and hangs up on whoever cannot have sent them."""

    def __init__(self, secret: bytes) -> None:
        # Hashed, or HMAC would take secrets that differ by zeros at their end for one.
        self._secret = sha256(b"baton control " + secret).digest()
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._out: _Seal | None = None
        self._in: _Seal | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is there."""
        # uvloop's transports have asyncio's methods but not its base classes.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        if peer is not None:
            _notice_dead_peers(peer)

    def data_received(self, data: bytes) -> None:
        """Some of the stream."""
        self._data += data
        start = 0
        while len(self._data) - start >= _HEAD.size and self._transport is not None:
            head = bytes(self._data[start : start + _HEAD.size])
            size, kind, number = _HEAD.unpack(head)
            if size > (_MAX_GREETING if self._in is None else _MAX_PAYLOAD):
                self.hang_up()
                return
            end = start + _HEAD.size + size
            tagged = end if self._in is None else end + _TAG_BYTES
            if tagged > len(self._data):
                break
            payload = bytes(self._data[start + _HEAD.size : end])
            tag = bytes(self._data[end:tagged])
            start = tagged
            self._take(head, kind, number, payload, tag)
        del self._data[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is gone."""
        self._transport = None

    def send(self, kind: FrameKind, number: int, payload: bytes) -> None:
        """Send a frame, if anybody is there."""
        if self._transport is None:
            return
        head = _HEAD.pack(len(payload), kind, number)
        tag = b"" if self._out is None else self._out.tag(head, payload)
        self._transport.write(head + payload + tag)

    def close(self) -> None:
        """Hang up after what is still to be sent."""
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @property
    def met(self) -> bool:
        """Whether the peer has shown that it knows the secret."""
        return self._in is not None

    @abstractmethod
    def greeted(self, kind: int, payload: bytes) -> None:
        """A frame of the handshake came."""

    @abstractmethod
    def frame(self, kind: int, number: int, payload: bytes) -> None:
        """A frame of a peer that has been met came."""

    def _take(self, head: bytes, kind: int, number: int, payload: bytes, tag: bytes) -> None:
        if self._in is None:
            self.greeted(kind, payload)
        elif hmac.compare_digest(tag, self._in.tag(head, payload)):
            self.frame(kind, number, payload)
        else:
            self.hang_up()

    def _derived(self, label: bytes, client: bytes, server: bytes) -> bytes:
        return hmac.digest(self._secret, b"baton " + label + client + server, "sha256")


class ServerEnd(Connection):
    """The end that was called."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._client: bytes | None = None  # its random number

    def greeted(self, kind: int, payload: bytes) -> None:
        """First the client's number, then its proof."""
        if self._client is None and kind == FrameKind.HELLO and len(payload) == _NONCE_BYTES:
            self._client = payload
            proof = self._derived(b"server", payload, self._nonce)
            self.send(FrameKind.HELLO, 0, self._nonce + proof)
            return
        client = self._client or b""
        proof = self._derived(b"client", client, self._nonce)
        if kind != FrameKind.PROOF or not client or not hmac.compare_digest(payload, proof):
            self.hang_up()
            return
        self._in = _Seal(self._derived(b"to server", client, self._nonce))
        self._out = _Seal(self._derived(b"to client", client, self._nonce))


class ClientEnd(Connection):
    """The end that calls. `meeting` resolves to whether the server knows the secret, to None when
    it hangs up before."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.meeting: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        super().connection_made(transport)
        self.send(FrameKind.HELLO, 0, self._nonce)

    def greeted(self, kind: int, payload: bytes) -> None:
        """The server's number and proof."""
        server, proof = payload[:_NONCE_BYTES], payload[_NONCE_BYTES:]
        known = kind == FrameKind.HELLO and len(proof) == _PROOF_BYTES
        if not known or not hmac.compare_digest(
            proof, self._derived(b"server", self._nonce, server)
        ):
            self.hang_up()
            self._resolve(False)
            return
        self.send(FrameKind.PROOF, 0, self._derived(b"client", self._nonce, server))
        self._out = _Seal(self._derived(b"to server", self._nonce, server))
        self._in = _Seal(self._derived(b"to client", self._nonce, server))
        self._resolve(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody will show anything."""
        super().connection_lost(exc)
        self._resolve(None)

    def _resolve(self, known: bool | None) -> None:
        if not self.meeting.done():
            self.meeting.set_result(known)


def _notice_dead_peers(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", _DEAD_PEER_MS),
        ("TCP_KEEPIDLE", _ASK_AFTER_S),
        ("TCP_KEEPINTVL", _ASK_EVERY_S),
        ("TCP_KEEPCNT", _ASK_TIMES),
    ):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
