"""The contract of a transfer backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.errors import HandoffFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkId:
    """One connection between two ranks: never used twice, so a late frame of an old one cannot
    match."""

    sender_epoch: int
    receiver_epoch: int
    source_rank: int
    dest_rank: int
    link: int

    def __str__(self) -> str:
        ends = f"{self.sender_epoch:x}.{self.source_rank}-{self.receiver_epoch:x}.{self.dest_rank}"
        return f"{ends}#{self.link}"


class LinkBroken(HandoffFailed):
    """The link failed or was closed. It stays broken: build another incarnation."""


class Link(Protocol):
    """One direction of bytes between two ranks, in order.

    send and recv are called by one thread at a time and block until this side is done with `data`,
    at most `timeout_s`; any failure, a timeout included, breaks the link and raises LinkBroken.
    `data` is a contiguous 1-D uint8 tensor on the rank's device; both sides pass the same number of
    bytes.
    """

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Send all of `data`."""
        ...

    def recv(self, data: torch.Tensor, timeout_s: float) -> None:
        """Fill all of `data`."""
        ...

    def close(self) -> None:
        """Break the link from any thread. Blocked calls on either side fail soon. Idempotent."""
        ...


class Backend(Protocol):
    """Makes links for one rank. All calls are safe from any thread.

    `name` is what LinkAddress.backend carries; two workers must use the same one.
    """

    name: str

    def listen(self) -> str:
        """Start listening on a free port, once; return the endpoint for connect()."""
        ...

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> Link:
        """The sender's end. Blocks until the receiver accepts the same id, or raises LinkBroken."""
        ...

    def accept(self, link: LinkId, timeout_s: float) -> Link:
        """The receiver's end. Blocks until the sender connects the same id, or raises
        LinkBroken."""
        ...

    def close(self) -> None:
        """Stop listening. Open links are closed by whoever holds them."""
        ...
