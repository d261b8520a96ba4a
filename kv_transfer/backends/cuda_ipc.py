"""Writes into the pool of another GPU of this host: decode exports it once, prefill maps it and
copies blocks over NVLink with one kernel for each piece; while the step that fills them still runs,
with one for each group of its layers, queued behind that group.

The receiver posts nothing and runs nothing. The sender commits only after its kernels have ended,
which proves completion; after an abort the blocks stay quarantined until the sender has confirmed
that it writes no more (control.receiver).
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import asdict
from secrets import token_hex

import torch

from kv_transfer.backends.base import BlockMove, End, LinkBroken, LinkId, LinkMode, PagedStore
from kv_transfer.backends.host import host_id
from kv_transfer.config import ChecksumKind
from kv_transfer.cuda.copying import (
    CODES,
    Extent,
    PageTable,
    PoolCopies,
    PoolShape,
    converted_bytes,
    dense_rows,
    load_copies,
    pool_rows,
)
from kv_transfer.cuda.driver import Context, DriverError, close_memory, export_memory, open_memory
from kv_transfer.plan.checksum import content_checksum
from kv_transfer.plan.reshard import layer_groups
from observability.logging import get_logger

log = get_logger(__name__)


class Mapping:
    """Another rank's pool mapped into this process, until its last user leaves."""

    def __init__(self, handle: bytes, offset: int, shape: PoolShape) -> None:
        self.shape = shape
        self._base = open_memory(handle)
        self.address = self._base + offset
        self.users = 0

    def unmap(self) -> None:
        close_memory(self._base)


class _Write:
    """Page numbers and completion events of one write in flight."""

    def __init__(self, device: torch.device) -> None:
        self.pages = PageTable(device)
        # The step may take long: sleep until it. The copy is short: waking up would take a tenth.
        self.gate = torch.cuda.Event(blocking=True)
        self.done = torch.cuda.Event()
        self.gated = False

    def wait(self) -> None:
        if self.gated:
            self.gate.synchronize()
        self.done.synchronize()


class CudaIpcLink:
    """One direction into a mapped pool (sender), or nothing at all (receiver)."""

    mode = LinkMode.UNORDERED

    def __init__(self, link: LinkId, backend: CudaIpcBackend, endpoint: str | None) -> None:
        self._name = str(link)
        self._backend = backend
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._closed = False
        self._target = None if endpoint is None else backend.enter(endpoint)

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """Launch a write; the pool stays mapped until it is over. No timeout: a launched kernel
        cannot be interrupted and always finishes."""
        with self._lock:
            if self._closed or self._target is None or self._endpoint is None:
                raise LinkBroken(f"link {self._name} is closed, or the receiver's")
            target = self._backend.enter(self._endpoint)
        if not move.access.enter():
            self._backend.leave(self._endpoint)
            return lambda: 0
        try:
            write = None if move.discard else self._backend.launch(move, target)
        except BaseException:
            self._leave(move)
            raise
        return lambda: self._end(move, write)

    def _end(self, move: BlockMove, write: _Write | None) -> int:
        try:
            return 0 if write is None else self._backend.land(move, write)
        finally:
            self._leave(move)

    def _leave(self, move: BlockMove) -> None:
        move.access.leave()
        assert self._endpoint is not None
        self._backend.leave(self._endpoint)

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        """The checksum of what the peer has written, if `move` asks for one."""
        return lambda: self._sum(move)

    def _sum(self, move: BlockMove) -> int:
        with move.access.entered() as allowed:
            if not allowed or move.checksum is ChecksumKind.NONE:
                return 0
            return self._backend.sum_of(move)

    def close(self) -> None:
        """Begin no more writes; unmap once those in flight are over."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._endpoint is not None:
            self._backend.leave(self._endpoint)


class _WriteStream:
    """A CUDA stream for writes, which end in the order in which they began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)
        self._idle: list[_Write] = []

    def take(self) -> _Write:
        try:
            return self._idle.pop()
        except IndexError:
            return _Write(self._device)

    def give(self, write: _Write) -> None:
        self._idle.append(write)


class CudaIpcBackend:
    """One rank's exported pool, and the pools of others that it has mapped."""

    name = "cuda_ipc"

    def __init__(self, store: PagedStore, *, ctas: int) -> None:
        if not store.data.is_contiguous():
            raise ValueError("a pool must be contiguous to be shared")
        self._store = store
        self._owner = token_hex(8)  # a later process may export its pool by the same handle
        self._device = store.device
        self._lock = threading.Lock()
        self._mappings: dict[str, Mapping] = {}
        self._streams: dict[int, _WriteStream] = {}
        self._context = Context(self._device)
        self._pool = PoolCopies(store.data, kernel=load_copies(self._device), ctas=ctas)
        self._pool.prepare(CODES)
        self._stream = torch.cuda.Stream(self._device)

    def listen(self) -> str:
        try:
            with self._context:
                handle, offset = export_memory(self._store.data.data_ptr())
        except DriverError as error:
            raise LinkBroken(f"the pool cannot be shared: {error}", param="backend") from error
        what = {
            "owner": self._owner,
            "handle": base64.b64encode(handle).decode(),
            "offset": offset,
            "shape": asdict(self._pool.shape),
        }
        return f"{host_id()}|{json.dumps(what)}"

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> CudaIpcLink:
        """Map the receiver's pool, unless it is mapped already."""
        return CudaIpcLink(link, self, endpoint)

    def accept(self, link: LinkId, timeout_s: float) -> CudaIpcLink:
        return CudaIpcLink(link, self, None)

    def close(self) -> None:
        """Nothing listens; links unmap the pools that they use."""

    # --- for links ------------------------------------------------------------------------------

    def enter(self, endpoint: str) -> Mapping:
        """Use a pool. Raises LinkBroken, param "backend", when it cannot be mapped here."""
        with self._lock:
            mapping = self._mappings.get(endpoint)
            if mapping is None:
                mapping = self._mappings[endpoint] = self._map(endpoint)
            mapping.users += 1
            return mapping

    def leave(self, endpoint: str) -> None:
        with self._lock:
            mapping = self._mappings[endpoint]
            mapping.users -= 1
            if mapping.users:
                return
            del self._mappings[endpoint]
        try:
            with self._context:
                mapping.unmap()
        except DriverError as error:  # the mapping leaks until this process ends
            log.warning("a peer's pool could not be unmapped", extra={"reason": str(error)})

    def launch(self, move: BlockMove, target: Mapping) -> _Write:
        """Queue the copy of cells into a mapped pool, each group of layers behind the step that
        fills it."""
        peer = move.peer_cells
        if peer is None or peer.count != move.cells.count:
            raise LinkBroken("the peer's cells are not as many")
        here, there = self._pool.shape.dtype, target.shape.dtype
        size = converted_bytes(self._pool.cell_bytes(move.cells), here, there)
        if target.shape.page % size or (here != there and CODES not in (here, there)):
            raise LinkBroken("the peer's pool has another shape")
        with self._context:
            queue = self._stream_of(move.stream_index)
            write = queue.take()
            try:
                self._launch(move, target, write, queue.stream)
            except BaseException:
                queue.stream.synchronize()  # queued copies must not outlive the access
                raise
            write.done.record(queue.stream)
        return write

    def _launch(
        self, move: BlockMove, target: Mapping, write: _Write, stream: torch.cuda.Stream
    ) -> None:
        assert move.peer_cells is not None
        dtypes = self._pool.shape.dtype, target.shape.dtype
        size = self._pool.cell_bytes(move.cells)
        peer_size = converted_bytes(size, *dtypes)
        pages, peer_pages = write.pages.load(
            stream.cuda_stream,
            self._pool.pages(move.cells),
            target.shape.pages(move.peer_cells, peer_size),
        )
        marks = self._store.step_events if move.after else None
        write.gated = marks is not None and not marks.is_over(move.after)
        layer_bytes = move.cells.count * 2 * move.num_heads * size
        groups = layer_groups(move.num_layers, layer_bytes) if write.gated else [move.num_layers]
        first = move.first_layer
        for count in groups:
            if marks is not None and write.gated:
                marks.follow(stream, move.after, first + count - 1)
                write.gate.record(stream)
            source = self._pool.rows(
                move.cells, pages, first_layer=first, first_head=move.first_head
            )
            to = pool_rows(
                target.address,
                target.shape,
                first_layer=first,
                first_head=move.peer_first_head,
                cell_bytes=peer_size,
                pages=peer_pages,
            )
            self._pool.copy(source, to, self._extent(move, count), stream, dtypes)
            first += count

    def land(self, move: BlockMove, write: _Write) -> int:
        """Wait for a copy; the checksum of what was written."""
        write.wait()
        self._stream_of(move.stream_index).give(write)
        return 0 if move.checksum is ChecksumKind.NONE else self.sum_of(move)

    def _stream_of(self, index: int) -> _WriteStream:
        with self._lock:
            stream = self._streams.get(index)
            if stream is None:
                stream = self._streams[index] = _WriteStream(self._device)
            return stream

    def sum_of(self, move: BlockMove) -> int:
        """The checksum of blocks of this rank's pool, as they travel."""
        extent = self._extent(move, move.num_layers)
        dtypes = self._pool.shape.dtype, CODES if move.coded else self._pool.shape.dtype
        dense = extent.as_type(*dtypes)
        size = dense.num_layers * dense.num_cells * 2 * dense.num_heads * dense.cell_bytes
        with self._context, torch.cuda.stream(self._stream):
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            table = PageTable(self._device)
            (pages,) = table.load(self._stream.cuda_stream, self._pool.pages(move.cells))
            source = self._pool.rows(
                move.cells, pages, first_layer=move.first_layer, first_head=move.first_head
            )
            rows = dense_rows(data.data_ptr(), dense)
            self._pool.copy(source, rows, extent, self._stream, dtypes)
            return content_checksum(data, move.checksum)

    def _extent(self, move: BlockMove, num_layers: int) -> Extent:
        return Extent(
            num_layers=num_layers,
            num_cells=move.cells.count,
            num_heads=move.num_heads,
            cell_bytes=self._pool.cell_bytes(move.cells),
        )

    def _map(self, endpoint: str) -> Mapping:
        host, _, rest = endpoint.partition("|")
        if host != host_id():
            raise LinkBroken("the peer's pool is on another host", param="backend")
        try:
            what = json.loads(rest)
            handle, offset = base64.b64decode(what["handle"]), int(what["offset"])
            shape = PoolShape(**what["shape"])
            with self._context:
                self._pool.prepare(shape.dtype)
                return Mapping(handle, offset, shape)
        except (DriverError, KeyError, TypeError, ValueError) as error:
            text = f"the peer's pool cannot be mapped: {error}"
            raise LinkBroken(text, param="backend") from error
