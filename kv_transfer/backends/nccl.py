"""Links between GPUs of any hosts: a two-party NCCL communicator for each pair of ranks.

Small messages waste NVLink, so blocks are gathered into large staging buffers by one kernel, sent,
and scattered by one kernel. A few buffers take turns: while one is on the wire the next is filled,
and the host waits for GPU work only where blocks are touched, so that a hand-off can be revoked
between two buffers. Both sides post only once the sender's data is ready (the piece protocol), and
every wait ends at a deadline, which aborts the communicator.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kv_transfer.backends.base import BlockMove, LinkBroken, LinkId
from kv_transfer.backends.cuda_ipc import shape_of
from kv_transfer.backends.rendezvous import Meeting, SocketStore, call
from kv_transfer.backends.watch import Watch
from kv_transfer.checksum import content_checksum
from kv_transfer.cuda.copying import (
    Extent,
    PageTable,
    Rows,
    compile_copies,
    copy_rows,
    dense_rows,
    pool_rows,
)
from kv_transfer.cuda.nccl import Communicator, unique_id
from kv_transfer.store import PagedStore

_SENDER, _RECEIVER = 0, 1
_BUFFERS = 2
_WARM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one staging buffer carries: some layers of a message."""

    first_layer: int
    num_layers: int
    num_bytes: int


class _Slot:
    """A staging buffer, and the event after which the wire is done with it."""

    def __init__(self, device: torch.device) -> None:
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.wired = torch.cuda.Event()

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes, for use after `wired`."""
        if self.data.numel() < num_bytes:
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=self.data.device)
        return self.data[:num_bytes]


class NcclLink:
    """One end of a pair. Copies run on one stream, NCCL on another of high priority."""

    def __init__(
        self, link: LinkId, group: Communicator, backend: NcclBackend, chunk_bytes: int
    ) -> None:
        self._name = str(link)
        self._group = group
        self._backend = backend
        self._store = backend.store
        self._shape = shape_of(backend.store)
        self._device = backend.store.device
        self._chunk_bytes = chunk_bytes
        self._broken = threading.Event()
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()
            self._wire = torch.cuda.Stream(priority=-1)
            self._copied = torch.cuda.Event()
            self._pages = PageTable(self._device)
            self._slots = [_Slot(self._device) for _ in range(_BUFFERS)]

    def send_blocks(self, move: BlockMove, timeout_s: float) -> int:
        """Gather and send, buffer by buffer; returns when the last has left."""
        return self._move(move, timeout_s, sending=True)

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> int:
        """Receive and scatter, buffer by buffer."""
        return self._move(move, timeout_s, sending=False)

    def warm(self, *, sending: bool, limit: float) -> None:
        """Move a first message: NCCL connects its channels on it."""
        with self._working(limit):
            slot = self._slots[0]
            self._post(slot, slot.take(_WARM_BYTES), limit, sending=sending)
            self._await(slot.wired)

    def close(self) -> None:
        """Abort: whatever waits on either stream of this link ends."""
        if not self._broken.is_set():
            self._broken.set()
            self._group.abort()

    def _move(self, move: BlockMove, timeout_s: float, *, sending: bool) -> int:
        limit = time.monotonic() + timeout_s
        chunks = self._chunks(move)
        try:
            with self._working(limit):
                (pages,) = self._pages.load(self._shape.pages(move.cells, self._cell_bytes(move)))
                run = self._send_all if sending else self._recv_all
                return run(move, pages, chunks, limit)
        except RuntimeError as error:
            self.close()
            raise LinkBroken(f"link {self._name}: {error}") from error
        finally:
            if self._broken.is_set():
                self._group.abort()  # wait for whoever aborts: no kernel uses the buffers then

    def _send_all(
        self, move: BlockMove, pages: torch.Tensor, chunks: list[_Chunk], limit: float
    ) -> int:
        checksum = 0
        for index, chunk in enumerate(chunks):
            slot = self._slots[index % _BUFFERS]
            self._await(slot.wired)
            data = slot.take(chunk.num_bytes)
            with self._touching(move, last=chunk is chunks[-1]) as allowed:
                if allowed and not move.discard:
                    self._copy(move, pages, chunk, data, gather=True)
                self._post(slot, data, limit, sending=True)
            checksum += content_checksum(data, move.checksum)
        for slot in self._slots:
            self._await(slot.wired)
        return checksum

    def _recv_all(
        self, move: BlockMove, pages: torch.Tensor, chunks: list[_Chunk], limit: float
    ) -> int:
        checksum = 0
        for slot, chunk in zip(self._slots, chunks, strict=False):
            self._post(slot, slot.take(chunk.num_bytes), limit, sending=False)
        for index, chunk in enumerate(chunks):
            slot = self._slots[index % _BUFFERS]
            self._await(slot.wired)
            data = slot.take(chunk.num_bytes)
            checksum += content_checksum(data, move.checksum)
            with self._touching(move, last=chunk is chunks[-1]) as allowed:
                if allowed:
                    self._copy(move, pages, chunk, data, gather=False)
                for later in chunks[index + _BUFFERS : index + _BUFFERS + 1]:
                    self._post(slot, slot.take(later.num_bytes), limit, sending=False)
        return checksum

    @contextmanager
    def _touching(self, move: BlockMove, *, last: bool) -> Iterator[bool]:
        """Inside, a copy of blocks may be launched; however it ends, no copy is running after."""
        with move.access.entered(last=last) as allowed:
            try:
                yield allowed
            finally:
                self._copied.synchronize()

    def _post(self, slot: _Slot, data: torch.Tensor, limit: float, *, sending: bool) -> None:
        """Queue a message behind the last copy; its host work overlaps that copy."""
        self._wire.wait_event(self._copied)
        post = self._group.send if sending else self._group.recv
        post(data.data_ptr(), data.numel(), self._wire.cuda_stream, limit)
        slot.wired.record(self._wire)

    def _await(self, event: torch.cuda.Event) -> None:
        event.synchronize()  # an abort ends it
        if self._broken.is_set():
            raise LinkBroken(f"link {self._name} was closed or timed out")

    def _copy(
        self,
        move: BlockMove,
        pages: torch.Tensor,
        chunk: _Chunk,
        data: torch.Tensor,
        *,
        gather: bool,
    ) -> None:
        """One kernel between pool and buffer."""
        if gather and move.after and self._store.marks is not None:
            self._store.marks.follow(move.after, chunk.first_layer + chunk.num_layers - 1)
        extent = Extent(
            num_layers=chunk.num_layers,
            num_cells=move.cells.count,
            num_heads=move.num_heads,
            cell_bytes=self._cell_bytes(move),
        )
        pool = pool_rows(
            self._store.data.data_ptr(),
            self._shape,
            first_layer=chunk.first_layer,
            first_head=move.first_head,
            cell_bytes=extent.cell_bytes,
            pages=pages,
        )
        staged = dense_rows(data.data_ptr(), extent)
        sides: tuple[Rows, Rows] = (pool, staged) if gather else (staged, pool)
        copy_rows(*sides, extent, ctas=self._backend.copy_ctas)
        self._copied.record(self._stream)

    def _chunks(self, move: BlockMove) -> list[_Chunk]:
        """Whole layers, as many as a buffer holds: the same list on both sides."""
        layer = move.cells.count * 2 * move.num_heads * self._cell_bytes(move)
        step = max(1, self._chunk_bytes // layer)
        end = move.first_layer + move.num_layers
        counts = [(first, min(step, end - first)) for first in range(move.first_layer, end, step)]
        return [_Chunk(first, count, count * layer) for first, count in counts]

    def _cell_bytes(self, move: BlockMove) -> int:
        return self._shape.page * move.cells.size // self._store.block_size

    @contextmanager
    def _working(self, limit: float) -> Iterator[None]:
        """On the link's device and stream, and closed at `limit`."""
        with (
            self._backend.watch.guard(limit, self.close),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
        ):
            yield


class NcclBackend:
    """Makes links for one rank. `host` is the address to meet peers at."""

    name = "nccl"

    def __init__(
        self, store: PagedStore, *, host: str, staging_bytes: int, ctas: int, copy_ctas: int
    ) -> None:
        self.store = store
        self.copy_ctas = copy_ctas
        self.watch = Watch("kv-nccl-watch")
        self._host = host
        self._staging_bytes = staging_bytes
        self._ctas = ctas
        self._lock = threading.Lock()
        self._meeting: Meeting | None = None
        with torch.cuda.device(store.device):
            base = store.data.data_ptr()
            compile_copies(shape_of(store), base, store.device, staged=True)

    def listen(self) -> str:
        """Listen on a free port of `host`, once."""
        with self._lock:
            if self._meeting is None:
                self._meeting = Meeting(self._host)
            return self._meeting.endpoint

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> NcclLink:
        """Meet the receiver at its endpoint."""
        limit = time.monotonic() + timeout_s
        try:
            connection = call(endpoint, link, limit)
        except (OSError, ValueError) as error:
            raise LinkBroken(f"link {link}: cannot connect: {error}") from error
        return self._build(link, connection, _SENDER, limit)

    def accept(self, link: LinkId, timeout_s: float) -> NcclLink:
        """Wait for the sender."""
        limit = time.monotonic() + timeout_s
        with self._lock:
            meeting = self._meeting
        if meeting is None:
            raise LinkBroken(f"link {link}: not listening")
        return self._build(link, meeting.await_sender(link, limit), _RECEIVER, limit)

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
        self.watch.close()

    def _build(self, link: LinkId, connection: socket.socket, me: int, limit: float) -> NcclLink:
        with connection:
            try:
                name, chunk_bytes = self._agree(SocketStore(connection, limit), me)
                with torch.cuda.device(self.store.device):
                    torch.cuda.current_stream().synchronize()  # NCCL needs a current context
                    group = Communicator(name, me, ctas=self._ctas, limit=limit)
                made = NcclLink(link, group, self, chunk_bytes)
            except (OSError, RuntimeError, ValueError) as error:
                raise LinkBroken(f"link {link}: {error}") from error
        try:
            made.warm(sending=me == _SENDER, limit=limit)
        except RuntimeError as error:
            made.close()
            raise LinkBroken(f"link {link}: {error}") from error
        return made

    def _agree(self, store: SocketStore, me: int) -> tuple[bytes, int]:
        """The communicator's name and the size of a message, both as the sender says."""
        if me == _SENDER:
            name, size = unique_id(), self._staging_bytes
            store.set("nccl", name + size.to_bytes(8, "big"))
            return name, size
        told = store.get("nccl")
        return told[:-8], int.from_bytes(told[-8:], "big")
