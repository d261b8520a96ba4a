"""Handshake, seals and frame layout of one connection, without a socket.

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

import hmac
import secrets
import struct
from enum import IntEnum
from hashlib import blake2b, sha256

_HEAD = struct.Struct("!IBQ")
HEAD_BYTES = _HEAD.size
MAX_PAYLOAD_BYTES = 256 << 20
#: Largest payload from a peer that has not proved the secret yet.
_MAX_HANDSHAKE_BYTES = 256
_POSITION = struct.Struct("!Q")
_SEAL_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32


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
