"""One rank's host memory, and copies between it and the rank's pool."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.cuda.driver import Context, check, quick

Bytes = NDArray[numpy.uint8]
_HOST, _DEVICE = 1, 2  # CUmemorytype
#: Bytes between two events, and how many such pieces are queued: with less the copy engine waits
#: for the thread, and with more other copies of the process wait for the whole load.
_PIECE_BYTES = 32 << 20
_MAX_QUEUED = 2


class BlockPool(Protocol):
    """A rank's KV: `data[layer][block, ...]`, contiguous."""

    @property
    def data(self) -> Tensor: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def block_size(self) -> int: ...


class HostMemory:
    """`slots[slot, layer, byte]`: a slot has all layers of a block in one piece. Pinned beside a
    GPU. Raises OSError when the memory is refused."""

    def __init__(self, pool: BlockPool, num_slots: int) -> None:
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


_END = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _END),
        *((f"target_{name}", kind) for name, kind in _END),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _CudaCopier:
    """The copy engines move each block by one call, a row for each layer: no kernel takes a
    multiprocessor from a step. Either direction has a stream of its own, as the link has.

    A copy engine takes what is queued in its order. So a step's inputs and results pass by a kernel
    (engine.cuda.staging), or it would wait for a load, 21.5 ms instead of 5.9.

    A load is queued when the steps that used its blocks have landed, and a store when the step that
    wrote them has: neither has to wait for a stream of the engine.
    """

    def __init__(self, pool: Tensor, host: Bytes) -> None:
        self._device = pool.device
        self._pool = pool
        self._row = pool.shape[2]
        self._num_rows = pool.shape[0]
        self._pitch = pool.stride(0)
        self._context = Context(pool.device)
        self._address = host.ctypes.data
        with torch.cuda.device(pool.device):
            self._streams = {name: torch.cuda.Stream() for name in ("store", "load")}
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, host.nbytes, 0))
        if code:
            raise OSError(f"CUDA does not pin {host.nbytes} bytes of host memory: error {code}")

    def store(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        self._run("store", blocks, slots, host)

    def load(self, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        self._run("load", blocks, slots, host)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def _run(self, name: str, blocks: Sequence[int], slots: Sequence[int], host: Bytes) -> None:
        stream, size = self._streams[name], self._row * self._num_rows
        count = max(1, _PIECE_BYTES // size)
        queued: deque[torch.cuda.Event] = deque()
        for first in range(0, len(blocks), count):
            if len(queued) == _MAX_QUEUED:
                queued.popleft().synchronize()
            part = slice(first, first + count)
            with self._context:
                self._queue(name, stream, blocks[part], slots[part])
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            queued.append(event)
        if queued:
            queued.pop().synchronize()

    def _queue(
        self, name: str, stream: torch.cuda.Stream, blocks: Sequence[int], slots: Sequence[int]
    ) -> None:
        call, address = quick().cuMemcpy2DAsync_v2, ctypes.c_void_p(stream.cuda_stream)
        copy = _Copy2D(width=self._row, height=self._num_rows)
        host_end, pool_end = ("target", "source") if name == "store" else ("source", "target")
        for end, kind, pitch in ((host_end, _HOST, self._row), (pool_end, _DEVICE, self._pitch)):
            setattr(copy, f"{end}_type", kind)
            setattr(copy, f"{end}_pitch", pitch)
        base, size = self._pool.data_ptr(), self._row * self._num_rows
        for block, slot in zip(blocks, slots, strict=True):
            setattr(copy, f"{host_end}_host", self._address + slot * size)
            setattr(copy, f"{pool_end}_device", base + block * self._row)
            check("cuMemcpy2DAsync", call(ctypes.byref(copy), address))
