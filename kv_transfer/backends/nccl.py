"""Links between GPUs of any hosts: an NCCL communicator for each pair of ranks.

Small messages waste NVLink, so one kernel gathers blocks into a large staging buffer, and one
scatters them. Two buffers alternate, across hand-offs: copies run on one stream, NCCL on another,
events order them. The host queues pieces ahead of the wire, so the wire never waits for Python.
Both ranks post only once the sender's data is ready (plan.channel), and every wait ends at a
deadline, which aborts the communicator; queued work then runs to its end before the blocks are
released.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from framing.channel import Channel
from kv_transfer.backends.base import BlockMove, End, LinkBroken, LinkId, LinkMode, PagedStore
from kv_transfer.backends.rendezvous import RendezvousBackend
from kv_transfer.config import ChecksumKind
from kv_transfer.cuda.copying import (
    CODES,
    PAGE_NUMBER_BYTES,
    Extent,
    PageTable,
    PoolCopies,
    converted_bytes,
    dense_rows,
    load_copies,
)
from kv_transfer.cuda.driver import Event
from kv_transfer.cuda.nccl import Communicator, Staging, Watch, unique_id
from kv_transfer.plan.checksum import content_checksum

BUFFERS = 2  # one on the wire, the other being filled or emptied
_WARM_BYTES = 1 << 20
_STRETCH, _STRETCHES = 16, 4  # at most 4 stretches of 16 messages are queued


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of a message in one staging buffer: some layers, or cells of one layer."""

    first_layer: int
    num_layers: int
    first_cell: int
    num_cells: int
    num_bytes: int


class _Slot:
    """A staging buffer: `full` once a message is in it, `free` once that was sent or copied."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.full = Event()
        self.free = Event()


class _Move:
    """Page numbers, completion event and checksum of one move in flight."""

    def __init__(self, device: torch.device) -> None:
        self.pages = PageTable(device)
        self.done = torch.cuda.Event()
        self.checksum = 0


class NcclLink:
    """One end of a pair. Both streams have priority over the model's kernels: a copy that waits for
    a whole step holds up the wire."""

    mode = LinkMode.PIPELINED

    def __init__(
        self,
        link: LinkId,
        group: Communicator,
        backend: NcclBackend,
        chunk_bytes: int,
    ) -> None:
        self._name = str(link)
        self._group = group
        self._backend = backend
        self._store = backend.store
        self._pool = backend.pool
        self._device = backend.store.device
        self._chunk_bytes = chunk_bytes
        self._broken = threading.Event()
        self._aborted = threading.Lock()  # taken once, by the thread that aborts
        self._idle: deque[_Move] = deque()
        self._marks: deque[torch.cuda.Event] = deque()
        self._num_queued = 0
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(priority=-1)
            self._wire = torch.cuda.Stream(priority=-1)
            self._slots = [_Slot(chunk_bytes, self._device) for _ in range(BUFFERS)]
        self._next_slot = itertools.cycle(self._slots)

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Queue gathers and sends; over when all has left."""
        return self._begin(move, timeout_s, sending=True)

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Queue receives and scatters; over when all is there."""
        return self._begin(move, timeout_s, sending=False)

    def warm(self, *, sending: bool, limit: float) -> None:
        """Move a first message: NCCL connects its channels on it."""
        with self._working(limit):
            self._post(self._slots[0].data[:_WARM_BYTES], limit, sending=sending)
            self._wire.synchronize()
            self._check()

    def close(self) -> None:
        """Abort: work that waits on either stream of this link ends. That takes NCCL half a second,
        too long for an event loop, so a thread does it."""
        self._broken.set()
        if not self._aborted.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._abort, name=f"kv-abort-{self._name}").start()
        except RuntimeError:  # no thread can be started
            self._abort()

    def _abort(self) -> None:
        with torch.cuda.device(self._device):  # NCCL goes back to the device that it was called on
            self._group.abort()  # as a method it keeps the link's buffers until no kernel uses them
        self._backend.staging.give(self._chunk_bytes)

    def _begin(self, move: BlockMove, timeout_s: float, *, sending: bool) -> End:
        limit = time.monotonic() + timeout_s
        entered = move.access.enter()
        touches = entered and not move.discard
        queue = self._send if sending else self._receive
        try:
            with self._working(limit):
                state = self._idle.popleft() if self._idle else _Move(self._device)
                state.checksum = 0
                numbers = self._pool.pages(move.cells)
                (pages,) = state.pages.load(self._stream.cuda_stream, numbers)
                for chunk in self._chunks(move):
                    self._keep_short()
                    data = queue(move, chunk, pages if touches else None, limit)
                    if move.checksum is not ChecksumKind.NONE:  # waits for it
                        state.checksum += content_checksum(data, move.checksum)
                state.done.record(self._wire if sending else self._stream)
        except BaseException:
            if entered:
                move.access.leave()
            raise
        return partial(self._end, move, state, limit, entered=entered)

    def _keep_short(self) -> None:
        """Wait before the device's queues get full: a call on a full one blocks with the
        interpreter's lock, and no other thread could close the link."""
        self._num_queued += 1
        if self._num_queued % _STRETCH == 0:
            mark = torch.cuda.Event()
            mark.record(self._stream)
            self._marks.append(mark)
            if len(self._marks) > _STRETCHES:
                self._marks.popleft().synchronize()

    def _end(self, move: BlockMove, state: _Move, limit: float, *, entered: bool) -> int:
        try:
            with self._working(limit):
                state.done.synchronize()  # an abort ends it
                self._check()
        finally:
            if entered:
                move.access.leave()
        self._idle.append(state)
        return state.checksum

    def _send(
        self, move: BlockMove, chunk: _Chunk, pages: int | None, limit: float
    ) -> torch.Tensor:
        slot = next(self._next_slot)
        data = slot.data[: chunk.num_bytes]
        slot.free.hold(self._stream)
        if pages is not None:
            self._copy(move, chunk, pages, data, gather=True)
        slot.full.record(self._stream)
        slot.full.hold(self._wire)
        self._post(data, limit, sending=True)
        slot.free.record(self._wire)
        return data

    def _receive(
        self, move: BlockMove, chunk: _Chunk, pages: int | None, limit: float
    ) -> torch.Tensor:
        slot = next(self._next_slot)
        data = slot.data[: chunk.num_bytes]
        slot.free.hold(self._wire)
        self._post(data, limit, sending=False)
        slot.full.record(self._wire)
        slot.full.hold(self._stream)
        if pages is not None:
            self._copy(move, chunk, pages, data, gather=False)
        slot.free.record(self._stream)
        return data

    def _post(self, data: torch.Tensor, limit: float, *, sending: bool) -> None:
        post = self._group.send if sending else self._group.recv
        post(data.data_ptr(), data.numel(), self._wire.cuda_stream, limit)

    def _check(self) -> None:
        if self._broken.is_set():
            raise LinkBroken(f"link {self._name} was closed or timed out")

    def _copy(
        self,
        move: BlockMove,
        chunk: _Chunk,
        pages: int,
        data: torch.Tensor,
        *,
        gather: bool,
    ) -> None:
        if gather and move.after and self._store.step_events is not None:
            last = chunk.first_layer + chunk.num_layers - 1
            self._store.step_events.follow(self._stream, move.after, last)
        pages += PAGE_NUMBER_BYTES * chunk.first_cell
        pool = self._pool.rows(
            move.cells, pages, first_layer=chunk.first_layer, first_head=move.first_head
        )
        extent = Extent(
            num_layers=chunk.num_layers,
            num_cells=chunk.num_cells,
            num_heads=move.num_heads,
            cell_bytes=self._pool.cell_bytes(move.cells),
        )
        dtypes = self._pool.shape.dtype, self._travelling(move)
        dense = extent.as_type(*dtypes)
        staged = dense_rows(data.data_ptr(), dense)
        if gather:
            self._pool.copy(pool, staged, extent, self._stream, dtypes)
        else:
            self._pool.copy(staged, pool, dense, self._stream, dtypes[::-1])

    def _travelling(self, move: BlockMove) -> str:
        return CODES if move.coded else self._pool.shape.dtype

    def _chunks(self, move: BlockMove) -> list[_Chunk]:
        """Whole layers, as many as a buffer holds, or else cells of one layer. Both ends compute
        the same list."""
        size = self._pool.cell_bytes(move.cells)
        size = converted_bytes(size, self._pool.shape.dtype, self._travelling(move))
        cell = 2 * move.num_heads * size
        cells = move.cells.count
        layers = max(1, self._chunk_bytes // (cells * cell))
        step = min(cells, self._chunk_bytes // cell)
        chunks = []
        for layer in range(move.first_layer, move.first_layer + move.num_layers, layers):
            count = min(layers, move.first_layer + move.num_layers - layer)
            for first in range(0, cells, step):
                some = min(step, cells - first)
                chunks.append(_Chunk(layer, count, first, some, count * some * cell))
        return chunks

    @contextmanager
    def _working(self, limit: float) -> Iterator[None]:
        """On the link's device and copy stream. Closes the link at `limit` or on a failure, and
        returns only when none of its work runs any more."""
        try:
            with (
                self._backend.watch.guard(limit, self.close),
                torch.cuda.device(self._device),
                torch.cuda.stream(self._stream),
            ):
                self._check()
                yield
        except BaseException as error:
            self.close()
            self._group.abort()  # waits for an abort in progress
            self._stream.synchronize()
            self._wire.synchronize()
            if not isinstance(error, RuntimeError) or isinstance(error, LinkBroken):
                raise
            raise LinkBroken(f"link {self._name}: {error}") from error


class NcclBackend(RendezvousBackend[NcclLink]):
    """Makes links for one rank."""

    name = "nccl"

    def __init__(
        self,
        store: PagedStore,
        *,
        host: str,
        ports: str = "",
        staging: Staging,
        ctas: int,
        copy_ctas: int,
    ) -> None:
        super().__init__(host, ports)
        self.store = store
        self.staging = staging
        self.pool = PoolCopies(store.data, kernel=load_copies(store.device), ctas=copy_ctas)
        self.pool.prepare(CODES)
        self.watch = Watch("kv-nccl-watch")
        self._ctas = ctas

    def close(self) -> None:
        super().close()
        self.watch.close()

    def _build(self, link: LinkId, channel: Channel, *, is_sender: bool, limit: float) -> NcclLink:
        with closing(channel):
            # A block of one layer: less cannot be a message.
            size = self.staging.take(2 * self.pool.shape.num_heads * self.pool.shape.page)
            try:
                name, agreed = self._agree(channel, size, is_sender=is_sender, limit=limit)
                self.staging.shrink(size - agreed)
                size = agreed
                with torch.cuda.device(self.store.device):
                    torch.cuda.current_stream().synchronize()  # NCCL needs a current context
                    group = Communicator(name, 0 if is_sender else 1, ctas=self._ctas, limit=limit)
                made = self._make_link(link, group, size)
            except (OSError, RuntimeError, ValueError) as error:
                self.staging.give(size)
                raise LinkBroken(f"link {link}: {error}") from error
        made.warm(sending=is_sender, limit=limit)
        return made

    def _make_link(self, link: LinkId, group: Communicator, size: int) -> NcclLink:
        try:
            return NcclLink(link, group, self, size)
        except BaseException:  # there may be no memory for its buffers
            group.abort()
            raise

    def _agree(
        self, channel: Channel, size: int, *, is_sender: bool, limit: float
    ) -> tuple[bytes, int]:
        """The communicator's id, which the sender makes, and the size of a message: the smaller of
        what the two ends can stage."""
        if is_sender:
            name = unique_id()
            channel.send(name + size.to_bytes(8, "big"), limit)
            return name, int.from_bytes(channel.receive(limit), "big")
        offer = channel.receive(limit)
        size = min(size, int.from_bytes(offer[-8:], "big"))
        channel.send(size.to_bytes(8, "big"), limit)
        return offer[:-8], size
