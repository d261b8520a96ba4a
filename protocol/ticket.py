"""Tickets: the router's signed permission for one hand-off between two worker epochs."""

from __future__ import annotations

import hashlib
import hmac
import math

from msgspec.structs import replace

from protocol.errors import StaleMessage
from protocol.ids import RequestKey
from protocol.message import Message


class Ticket(Message):
    """Permission to write `num_blocks` blocks for `key` from one epoch into another, for a while.

    `lifetime_s` starts on each worker when it accepts the request. `signature` is HMAC-SHA256
    (RFC 2104) over all other fields with the cluster's secret.
    """

    key: RequestKey
    prefill_epoch: int
    decode_epoch: int
    num_blocks: int
    signature: bytes = b""
    lifetime_s: float

    def _body(self) -> bytes:
        fields = (
            self.key.request_id,
            self.key.attempt,
            self.prefill_epoch,
            self.decode_epoch,
            self.num_blocks,
            self.lifetime_s.hex(),
        )
        return "\x1f".join(map(str, fields)).encode()

    def signed(self, secret: bytes) -> Ticket:
        digest = hmac.new(secret, self._body(), hashlib.sha256).digest()
        return replace(self, signature=digest)

    def verify(self, secret: bytes) -> None:
        """Raise StaleMessage when the signature is wrong or the lifetime is not finite."""
        expected = hmac.new(secret, self._body(), hashlib.sha256).digest()
        if not hmac.compare_digest(expected, self.signature):
            raise StaleMessage(f"ticket of {self.key} has a wrong signature", param="ticket")
        if not math.isfinite(self.lifetime_s):
            raise StaleMessage(f"ticket of {self.key} never ends", param="ticket")
