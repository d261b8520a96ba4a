"""Writes into the pool of another GPU of this host: decode exports it once, prefill maps it and
copies blocks over NVLink with one kernel for each piece.

The receiver posts nothing and runs nothing. What proves completion is that the sender commits only
after its kernels have ended; what makes an abort safe is that an ended hand-off's blocks stay
quarantined until the writer has confirmed that it is done (receiver.Receiver).
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from kv_transfer.backends.base import BlockMove, LinkBroken, LinkId
from kv_transfer.backends.host import host_id
from kv_transfer.checksum import content_checksum
from kv_transfer.config import ChecksumKind
from kv_transfer.cuda.copying import PageTable, PoolShape, Rows, copy_rows, dense_rows, pool_rows
from kv_transfer.cuda.driver import DriverError, close_memory, export_memory, open_memory
from kv_transfer.store import PagedStore
from observability.logging import get_logger

log = get_logger(__name__)


def shape_of(store: PagedStore) -> PoolShape:
    """The shape of a store's pool."""
    return PoolShape(
        num_layers=store.num_layers,
        num_blocks=store.data.shape[1],
        num_heads=store.num_heads,
        page=store.block_size * store.head_dim * store.dtype.itemsize,
    )


class Mapping:
    """Another rank's pool in this process. Unmapped when the last user has left."""

    def __init__(self, handle: bytes, offset: int, shape: PoolShape) -> None:
        self.shape = shape
        self._base = open_memory(handle)
        self.address = self._base + offset
        self.users = 0

    def unmap(self) -> None:
        """Only when nothing uses it."""
        close_memory(self._base)


class CudaIpcLink:
    """One direction into a mapped pool (sender), or nothing at all (receiver)."""

    def __init__(self, link: LinkId, backend: CudaIpcBackend, endpoint: str | None) -> None:
        self._name = str(link)
        self._backend = backend
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._closed = False
        self._target = None if endpoint is None else backend.enter(endpoint)
        self._done = torch.cuda.Event()
        self._pages = PageTable(backend.device)

    def send_blocks(self, move: BlockMove, timeout_s: float) -> int:
        """Write the blocks into the peer's pool; returns when they are there. A kernel that runs
        cannot be interrupted, and ends by itself: `timeout_s` is not needed."""
        target = self._target
        if target is None:
            raise LinkBroken(f"link {self._name} is the receiver's")
        with self._lock:  # close waits for the write: then nothing is mapped any more
            if self._closed:
                raise LinkBroken(f"link {self._name} is closed")
            with move.access.entered() as allowed:
                if not allowed or move.discard:
                    return 0
                return self._backend.write(move, target, self._pages, self._done)

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> int:
        """The checksum of what the peer has written, if one is asked for."""
        with move.access.entered() as allowed:
            if not allowed or move.checksum is ChecksumKind.NONE:
                return 0
            return self._backend.sum_of(move)

    def close(self) -> None:
        """Unmap, after at most the one write that is running."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._endpoint is not None:
            self._backend.leave(self._endpoint)


class CudaIpcBackend:
    """One rank's exported pool, and the pools of others that it has mapped."""

    name = "cuda_ipc"

    def __init__(self, store: PagedStore, *, ctas: int) -> None:
        if not store.data.is_contiguous():
            raise ValueError("a pool must be contiguous to be shared")
        self._store = store
        self._shape = shape_of(store)
        self._ctas = ctas
        self.device = self._device = store.device
        self._lock = threading.Lock()
        self._mappings: dict[str, Mapping] = {}
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()

    def listen(self) -> str:
        """Export the pool."""
        try:
            with self._context():
                handle, offset = export_memory(self._store.data.data_ptr())
        except DriverError as error:
            raise LinkBroken(f"the pool cannot be shared: {error}", param="backend") from error
        what = {
            "handle": base64.b64encode(handle).decode(),
            "offset": offset,
            "shape": asdict(self._shape),
        }
        return f"{host_id()}|{json.dumps(what)}"

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> CudaIpcLink:
        """Map the receiver's pool, unless it is mapped already."""
        return CudaIpcLink(link, self, endpoint)

    def accept(self, link: LinkId, timeout_s: float) -> CudaIpcLink:
        """The receiver has nothing to wait for."""
        return CudaIpcLink(link, self, None)

    def close(self) -> None:
        """Nothing listens; mappings are given up by the links that use them."""

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
        """Use it no more."""
        with self._lock:
            mapping = self._mappings[endpoint]
            mapping.users -= 1
            if mapping.users:
                return
            del self._mappings[endpoint]
        try:
            with self._context():
                mapping.unmap()
        except DriverError as error:  # the mapping leaks until this process ends
            log.warning("a peer's pool could not be unmapped", extra={"reason": str(error)})

    def write(
        self, move: BlockMove, target: Mapping, table: PageTable, done: torch.cuda.Event
    ) -> int:
        """Copy blocks into a mapped pool and wait for the copy."""
        page = self._shape.page
        if target.shape.page != page or len(move.peer_blocks) != len(move.blocks):
            raise LinkBroken("the peer's pool has another shape")
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pages, peer_pages = table.load(move.blocks, move.peer_blocks)
            to = pool_rows(
                target.address,
                target.shape,
                first_layer=move.first_layer,
                first_head=move.peer_first_head,
                pages=peer_pages,
            )
            self._copy(move, self._rows(move, pages), to)
            done.record(self._stream)
        done.synchronize()
        return 0 if move.checksum is ChecksumKind.NONE else self.sum_of(move)

    def sum_of(self, move: BlockMove) -> int:
        """The checksum of blocks of the own pool."""
        shape = (move.num_layers, len(move.blocks), 2, move.num_heads, self._shape.page)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            data = torch.empty(shape, dtype=torch.uint8, device=self._device)
            to = dense_rows(
                data.data_ptr(),
                num_blocks=len(move.blocks),
                num_heads=move.num_heads,
                page=self._shape.page,
            )
            (pages,) = PageTable(self._device).load(move.blocks)
            self._copy(move, self._rows(move, pages), to)
            return content_checksum(data.view(-1), move.checksum)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The driver's calls need a current context, which a thread gets on its first call of the
        runtime."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()
            yield

    def _rows(self, move: BlockMove, pages: torch.Tensor) -> Rows:
        return pool_rows(
            self._store.data.data_ptr(),
            self._shape,
            first_layer=move.first_layer,
            first_head=move.first_head,
            pages=pages,
        )

    def _copy(self, move: BlockMove, source: Rows, target: Rows) -> None:
        copy_rows(
            source,
            target,
            num_layers=move.num_layers,
            num_blocks=len(move.blocks),
            run=move.num_heads * self._shape.page,
            ctas=self._ctas,
        )

    def _map(self, endpoint: str) -> Mapping:
        host, _, rest = endpoint.partition("|")
        if host != host_id():
            raise LinkBroken("the peer's pool is on another host", param="backend")
        try:
            what = json.loads(rest)
            shape = PoolShape(**what["shape"])
            with self._context():
                return Mapping(base64.b64decode(what["handle"]), what["offset"], shape)
        except (DriverError, KeyError, TypeError, ValueError) as error:
            text = f"the peer's pool cannot be mapped: {error}"
            raise LinkBroken(text, param="backend") from error
