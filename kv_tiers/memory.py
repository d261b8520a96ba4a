"""One rank's host memory, and copies between it and the rank's pool."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_tiers.config import PORTION_BYTES, STAGED_PORTIONS
from kv_transfer.backends.base import PagedStore
from kv_transfer.cuda.copying import (
    PAGE_NUMBER_BYTES,
    Extent,
    PageTable,
    Rows,
    copy_rows,
    load_copies,
)
from kv_transfer.cuda.driver import Context, Event, check, quick

Bytes = NDArray[numpy.uint8]
_ALIGN = 16  # bytes, of what `copy_rows` moves
#: Of one portion: a stream takes about a thousand copies before a call waits, and with it all
#: threads.
_PORTION_BLOCKS = 256
#: Thread blocks of the kernel, which has as long as the link takes for a portion.
_CTAS = 12


class HostMemory:
    """`slots[slot, layer, byte]`: a slot has all layers of a block in one piece. Pinned beside a
    GPU. Raises OSError when the memory is refused."""

    def __init__(self, pool: PagedStore, num_slots: int) -> None:
        flat = pool.data.view(pool.data.shape[0], pool.data.shape[1], -1).view(torch.uint8)
        self.slot_bytes = flat.shape[0] * flat.shape[2]
        num_bytes = num_slots * self.slot_bytes
        try:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, num_bytes, flags=private)
        except ValueError as error:  # so many that they are no length of a mapping
            raise OSError(f"{num_bytes} bytes of host memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = numpy.frombuffer(self._map, numpy.uint8)
        self.slots: Bytes = whole.reshape(num_slots, flat.shape[0], flat.shape[2])
        self._copier = _CudaCopier(flat, self.slots) if flat.is_cuda else _CpuCopier(flat)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks[i] to slots[i]; returns once all is there."""
        self._copier.store(blocks, slots, self.slots)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots[i] to blocks[i]; returns once all is there."""
        self._copier.load(blocks, slots, self.slots)

    def close(self) -> None:
        """No copy may be running."""
        self._copier.close()


class _CpuCopier:
    """numpy copies without the interpreter's lock, and without a team of threads."""

    def __init__(self, pool: Tensor) -> None:
        self._pool: Bytes = pool.numpy()

    def store(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            host[slot] = self._pool[:, block]

    def load(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self._pool[:, block] = host[slot]

    def close(self) -> None:
        """Nothing is registered."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Blocks that are staged together: `count` after the `first` of all. `runs` are slots that
    follow each other: the first, and how many."""

    first: int
    count: int
    runs: tuple[tuple[int, int], ...]


def portions(slots: Sequence[int], size: int) -> Iterator[Portion]:
    """Cut a copy of these slots, in this order, into portions of at most `size` blocks."""
    for first in range(0, len(slots), size):
        part = slots[first : first + size]
        starts = [at for at, slot in enumerate(part) if not at or slot != part[at - 1] + 1]
        ends = [*starts[1:], len(part)]
        runs = tuple((part[at], end - at) for at, end in zip(starts, ends, strict=True))
        yield Portion(first, len(part), runs)


class _Way:
    """One direction: its streams, and staging memory for the portions in flight. Work begins on the
    stream `first` and ends on `last`. `size`: blocks of the largest copy."""

    def __init__(self, device: torch.device, portion_bytes: int, size: int, *, loads: bool) -> None:
        self.loads = loads
        self.lock = threading.Lock()  # threads that are closed leave copies to their callers
        self.link, self.kernels = torch.cuda.Stream(device), torch.cuda.Stream(device)
        streams = (self.link, self.kernels) if loads else (self.kernels, self.link)
        self.first, self.last = streams
        self.staging = torch.empty(
            (STAGED_PORTIONS, portion_bytes), dtype=torch.uint8, device=device
        )
        self.pages = PageTable(device, size)
        self.staged = Event()  # what `first` does for a portion has ended
        self.ended = [torch.cuda.Event(blocking=True) for _ in range(STAGED_PORTIONS)]


class _CudaCopier:
    """Slots pass through staging memory of the GPU. A copy engine moves slots that follow each
    other by one call, and a kernel those of a portion between staging and all layers of their
    blocks, while the engine moves the next. Either direction has streams of its own, as the link
    has.

    A copy engine takes what is queued in its order. So a step's inputs and results pass by a kernel
    (engine.cuda.staging), or it would wait for a load, 21.5 ms instead of 5.9.

    A load is queued when the steps that used its blocks have landed, and a store when the step that
    wrote them has: neither has to wait for a stream of the engine.
    """

    def __init__(self, pool: Tensor, host: Bytes) -> None:
        self._num_layers, num_blocks, self._row = pool.shape
        if self._row % _ALIGN:
            raise OSError(f"a block has {self._row} bytes a layer: not a multiple of {_ALIGN}")
        self._device = pool.device
        self._pool = pool
        self._size = self._row * self._num_layers
        self._address = host.ctypes.data
        size = min(len(host), num_blocks)
        self._count = max(1, min(PORTION_BYTES // self._size, _PORTION_BLOCKS, size))
        self._context = Context(pool.device)
        try:
            with torch.cuda.device(pool.device):
                self._kernel = load_copies(pool.device)
                self._load, self._store = (
                    _Way(pool.device, self._count * self._size, size, loads=loads)
                    for loads in (True, False)
                )
                code = int(torch.cuda.cudart().cudaHostRegister(self._address, host.nbytes, 0))
        except torch.OutOfMemoryError as error:
            raise OSError(f"no staging memory on {pool.device}: {error}") from error
        if code:
            raise OSError(f"CUDA does not pin {host.nbytes} bytes of host memory: error {code}")

    def store(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        self._run(self._store, blocks, slots)

    def load(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        self._run(self._load, blocks, slots)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def _run(self, way: _Way, blocks: Sequence[int], slots: Sequence[int]) -> None:
        order = sorted(range(len(slots)), key=slots.__getitem__)  # so that runs are long
        with way.lock, self._context:
            try:
                numbers = [blocks[at] for at in order]
                (pages,) = way.pages.load(way.first.cuda_stream, numbers)
                for index, portion in enumerate(portions([slots[at] for at in order], self._count)):
                    stage = index % STAGED_PORTIONS
                    way.ended[stage].synchronize()
                    self._queue(way, stage, portion, pages + PAGE_NUMBER_BYTES * portion.first)
                    way.ended[stage].record(way.last)
            finally:  # also after an error: blocks and slots are free for others then
                way.ended[0].record(way.last)
                way.ended[0].synchronize()

    def _queue(self, way: _Way, stage: int, portion: Portion, pages: int) -> None:
        staging = way.staging[stage].data_ptr()
        if way.loads:
            self._cross_link(way, staging, portion)
        else:
            self._copy_blocks(way, staging, portion.count, pages)
        way.staged.record(way.first)
        way.staged.hold(way.last)
        if way.loads:
            self._copy_blocks(way, staging, portion.count, pages)
        else:
            self._cross_link(way, staging, portion)

    def _cross_link(self, way: _Way, staging: int, portion: Portion) -> None:
        calls, stream = quick(), way.link.cuda_stream
        for slot, count in portion.runs:
            host, size = self._address + slot * self._size, count * self._size
            if way.loads:
                code = calls.cuMemcpyHtoDAsync_v2(staging, host, size, stream)
            else:
                code = calls.cuMemcpyDtoHAsync_v2(host, staging, size, stream)
            check("cuMemcpyAsync", code)
            staging += size

    def _copy_blocks(self, way: _Way, staging: int, count: int, pages: int) -> None:
        half = self._row // 2  # the kernel joins both halves of the one head
        staged = Rows(address=staging, layer=self._row, page=self._size, half=half, head=half)
        paged = Rows(
            address=self._pool.data_ptr(),
            pages=pages,
            layer=self._pool.stride(0),
            page=self._row,
            half=half,
            head=half,
        )
        source, target = (staged, paged) if way.loads else (paged, staged)
        extent = Extent(num_layers=self._num_layers, num_cells=count, num_heads=1, cell_bytes=half)
        stream = way.kernels.cuda_stream
        copy_rows(source, target, extent, kernel=self._kernel, stream=stream, ctas=_CTAS)
