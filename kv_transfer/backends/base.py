"""The contract between a transfer backend, a rank's KV pool and the data plane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch

from kv_transfer.config import ChecksumKind
from kv_transfer.plan.states import ACCESS_TRANSITIONS, AccessState, advance
from protocol.errors import HandoffFailed
from protocol.kv_layout import Cells

# --- the pool -------------------------------------------------------------------------------------


class LayerEvents(Protocol):
    """How far a rank's engine is: lets a copy be queued behind a step that still runs. Steps are
    numbered from 1, alike on all ranks. Safe from any thread."""

    def follow(self, stream: torch.cuda.Stream, step: int, layer: int) -> None:
        """Make a stream wait for the KV that `step` writes, up to and with `layer`."""

    def wait(self, step: int, layer: int) -> None:
        """Block until that is written."""

    def is_over(self, step: int) -> bool:
        """Whether all KV of `step` is written."""


class BlockStore(Protocol):
    """One rank's paged KV, `[layer][block, k/v, kv_head, token, head_dim]`. The engine's pool
    satisfies it structurally.

    Heads are counted within the rank. Both calls are safe from any thread as long as the caller
    owns the blocks; on a GPU they are ordered on the current stream. `dtype` is uint8 where KV are
    e4m3 codes. `step_events` is None where a
    step is over as soon as it was launched.
    """

    num_layers: int
    num_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def step_events(self) -> LayerEvents | None:
        """How far steps in flight are."""

    def gather(
        self, cells: Cells, layers: range, heads: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A contiguous copy `[layer, cell, k/v, head, token, head_dim]` of the named slice."""

    def scatter(self, cells: Cells, layers: range, heads: range, data: torch.Tensor) -> None:
        """Write `data`, shaped as `gather` returns it, into the named slice."""


class PagedStore(BlockStore, Protocol):
    """A store whose pages lie in one contiguous tensor, as a GPU's must."""

    data: torch.Tensor


class PoolAccess:
    """Permission of one message to read or write the pool's blocks. It can be revoked as long as it
    is not in use. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = AccessState.ALLOWED
        self._over: Future[None] | None = None  # once revoked

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Yields whether the pool may be touched inside the block, once."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave()

    def enter(self) -> bool:
        """Whether the pool may be touched from here on, until `leave`."""
        with self._lock:
            allowed = self._state is AccessState.ALLOWED
            if allowed:
                self._state = advance(ACCESS_TRANSITIONS, self._state, AccessState.ACTIVE)
            return allowed

    def leave(self) -> None:
        with self._lock:
            self._state = advance(ACCESS_TRANSITIONS, self._state, AccessState.OVER)
            over = self._over
        if over is not None:
            over.set_result(None)

    def revoke(self) -> Future[None]:
        """Forbid the access from now on. The future is done once the message cannot touch the pool:
        one that has entered has to leave first."""
        with self._lock:
            if self._state is AccessState.ALLOWED:
                self._state = advance(ACCESS_TRANSITIONS, self._state, AccessState.OVER)
            if self._over is None:
                self._over = Future()
                if self._state is AccessState.OVER:
                    self._over.set_result(None)
            return self._over


# --- links ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkId:
    """One incarnation of a connection between two ranks: never used twice, so a late frame of an
    old one cannot match."""

    sender_epoch: int
    receiver_epoch: int
    source_rank: int
    dest_rank: int
    incarnation: int

    def __str__(self) -> str:
        ends = f"{self.sender_epoch:x}.{self.source_rank}-{self.receiver_epoch:x}.{self.dest_rank}"
        return f"{ends}#{self.incarnation}"


class LinkBroken(HandoffFailed):
    """The link failed or was closed. It stays broken: build another incarnation."""


class Link(Protocol):
    """One direction of bytes between two ranks, in order.

    send and recv are called by one thread at a time and block until this end is done with `data`,
    at most `timeout_s`; any failure, a timeout included, breaks the link and raises LinkBroken.
    `data` is a contiguous 1-D uint8 tensor in host memory; both ends pass the same number of bytes.
    """

    def send(self, data: torch.Tensor, timeout_s: float) -> None:
        """Send all of `data`."""

    def recv(self, data: torch.Tensor, timeout_s: float) -> None:
        """Fill all of `data`."""

    def close(self) -> None:
        """Break the link from any thread. Blocked calls on either end fail soon. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """One message: cells of the rank's pool, some layers and heads of them.

    `peer_cells` and `peer_first_head` say where a sender's cells go (one-sided links only);
    `discard` keeps the two ends in step with a message whose content no longer matters. The source
    cells are complete once step `after` of the rank's engine has written its KV (0: they are).
    `place` seeds the checksum. `coded`: values travel as e4m3 codes, whatever the pool has. Moves
    of different `stream_index` need not wait for each other.
    """

    cells: Cells
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    access: PoolAccess
    checksum: ChecksumKind = ChecksumKind.NONE
    place: int = 0
    discard: bool = False
    peer_cells: Cells | None = None
    peer_first_head: int = 0
    coded: bool = False
    after: int = 0
    stream_index: int = 0


#: Blocks until a move is over; the checksum of its content. Raises LinkBroken.
End = Callable[[], int]


class LinkMode(StrEnum):
    """Which threads begin the moves of a link, and which call their Ends."""

    BLOCKING = "blocking"  # one thread: a move is over once it was begun
    PIPELINED = "pipelined"  # one thread begins all moves, another ends them, both in order
    UNORDERED = "unordered"  # any thread begins; Ends of one stream_index keep their order


@runtime_checkable
class BlockLink(Protocol):
    """A link that moves blocks between two pools. Any failure is final and raises LinkBroken;
    `close` may be called from any thread.

    Once an End was returned, it has to be called, whatever becomes of the link. Blocks are touched
    only inside `move.access`.
    """

    mode: LinkMode

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Begin to send the blocks."""

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Begin to fill the blocks. On a one-sided link they were written already: sums them."""

    def close(self) -> None:
        """Break the link from any thread. Idempotent."""


class Backend(Protocol):
    """Makes links for one rank. All calls are safe from any thread.

    `name` is what LinkAddress.backend carries; two workers must use the same one.
    """

    name: str

    def listen(self) -> str:
        """Start listening on a free port, once; return the endpoint for connect(). Raises
        LinkBroken when this rank cannot be reached this way."""

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> Link | BlockLink:
        """The sender's end. Blocks until the receiver accepts the same id, or raises LinkBroken."""

    def accept(self, link: LinkId, timeout_s: float) -> Link | BlockLink:
        """The receiver's end. Blocks until the sender connects the same id, or raises
        LinkBroken."""

    def close(self) -> None:
        """Stop listening. The owners of open links close them."""
