"""The contract of a transfer backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kv_transfer.backends.pool_access import PoolAccess
from kv_transfer.config import ChecksumKind
from protocol.errors import HandoffFailed
from protocol.kv_layout import Cells


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
        """Start listening on a free port, once; return the endpoint for connect(). Raises
        LinkBroken when this rank cannot be reached this way."""
        ...

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> Link | BlockLink:
        """The sender's end. Blocks until the receiver accepts the same id, or raises LinkBroken."""
        ...

    def accept(self, link: LinkId, timeout_s: float) -> Link | BlockLink:
        """The receiver's end. Blocks until the sender connects the same id, or raises
        LinkBroken."""
        ...

    def close(self) -> None:
        """Stop listening. Open links are closed by whoever holds them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """One message as a device link takes it: cells of the rank's pool, some layers and heads of
    them.

    `peer_cells` and `peer_first_head` say where a sender's cells go (one-sided links only);
    `discard` keeps the two ends in step with a message whose content no longer matters. The source
    cells are complete once step `after` of the rank's engine has written its KV (0: they are).
    Moves of other lanes need not wait for this one.
    """

    cells: Cells
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    access: PoolAccess
    checksum: ChecksumKind = ChecksumKind.NONE
    discard: bool = False
    peer_cells: Cells | None = None
    peer_first_head: int = 0
    after: int = 0
    lane: int = 0


#: Blocks until a move is over; the checksum of its content. Raises LinkBroken.
End = Callable[[], int]


@runtime_checkable
class BlockLink(Protocol):
    """A link that moves blocks between GPU pools itself. Any failure is final and raises
    LinkBroken; `close` may be called from any thread.

    A move has begun when its End is returned, and nothing waits for it until somebody calls the
    End, which has to happen whatever becomes of the link. With `ordered`, one thread begins all
    moves and another calls all Ends in the order in which they came; without, any thread may begin
    a move at any time, and only Ends of one lane keep their order.

    Blocks are touched only inside `move.access`.
    """

    ordered: bool

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Send the blocks."""
        ...

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Fill the blocks. On a one-sided link they were written already: sums what is there."""
        ...

    def close(self) -> None:
        """Break the link from any thread. Idempotent."""
        ...
