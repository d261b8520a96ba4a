"""The paged copy: which bytes of a pool go where, and whether they become codes or numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from struct import pack_into

import torch

from kv_transfer.cuda.driver import Kernel, check, quick
from protocol.kv_layout import DTYPE_BYTES, Cells

PAGE_NUMBER_BYTES = 4  # of one page number on the device
_ALIGN = 16
_TILE = 16384  # bytes
_SLOTS = 8  # tiles in flight in a thread block
_CONVERTED = 65536  # values of a tile that is converted
_SOURCE = Path(__file__).with_name("copy_rows.cu")
_BULK_COPIES = (9, 0)  # the first compute capability that has them
_NUMBERS = {"bfloat16": 0, "float16": 1, "float32": 2}  # NUMBER of copy_rows.cu
CODES = "uint8"  # how a pool of e4m3 codes names its type


def value_bytes(dtype: str) -> int:
    """Bytes of a value of a pool, whose codes are bytes."""
    return 1 if dtype == CODES else DTYPE_BYTES[dtype]


def converted_bytes(num_bytes: int, now: str, then: str) -> int:
    """What values that take so many bytes in one type take in another."""
    return num_bytes if now == then else num_bytes // value_bytes(now) * value_bytes(then)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """`[layer][block, k/v, kv_head, token, head_dim]`: `page` is the bytes of one token block of
    one head, `dtype` torch's name of its values' type."""

    num_blocks: int
    num_heads: int
    page: int
    dtype: str

    def pages(self, cells: Cells, cell_bytes: int) -> Sequence[int]:
        """Page numbers of cells, in the steps of `pool_rows`: blocks when a cell is a block, else
        cells."""
        if cell_bytes == self.page:
            return cells.blocks
        blocks, numbers = cells.places(self.page // cell_bytes)
        step = 2 * self.num_heads * self.page // cell_bytes
        return [block * step + number for block, number in zip(blocks, numbers, strict=True)]


class Rows(ctypes.Structure):
    """Source or target of a copy. `address` is that of the first head of the first page of the
    first layer; strides in bytes; `pages` is the address of the page numbers (int32) on the copying
    device, None when cells are contiguous."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("layer", ctypes.c_longlong),
        ("page", ctypes.c_longlong),
        ("half", ctypes.c_longlong),
        ("head", ctypes.c_longlong),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of one copy: keys and values of layers x cells x heads, `cell_bytes` each in the
    source."""

    num_layers: int
    num_cells: int
    num_heads: int
    cell_bytes: int

    def as_type(self, now: str, then: str) -> Extent:
        """The same values in another type."""
        return replace(self, cell_bytes=converted_bytes(self.cell_bytes, now, then))


def pool_rows(
    base: int,
    shape: PoolShape,
    *,
    first_layer: int,
    first_head: int,
    cell_bytes: int,
    pages: int,
) -> Rows:
    """Cells, `cell_bytes` a head, of a pool at address `base`; `pages` is the device address of
    PoolShape.pages."""
    half = shape.num_heads * shape.page
    layer = shape.num_blocks * 2 * half
    return Rows(
        address=base + first_layer * layer + first_head * shape.page,
        layer=layer,
        page=2 * half if cell_bytes == shape.page else cell_bytes,
        half=half,
        head=shape.page,
        pages=pages,
    )


def dense_rows(base: int, extent: Extent) -> Rows:
    """A contiguous `[layer, cell, k/v, head, token, head_dim]` at address `base`."""
    half = extent.num_heads * extent.cell_bytes
    return Rows(
        address=base,
        layer=extent.num_cells * 2 * half,
        page=2 * half,
        half=half,
        head=extent.cell_bytes,
        pages=None,
    )


class PageTable:
    """Page numbers on the device, copied from a pinned buffer. A load overwrites the one before,
    which must not be in use any more.

    The driver copies: torch's copy would take longer than the rest of a launch. `size`: numbers
    for which there is room at first."""

    def __init__(self, device: torch.device, size: int = 2048) -> None:
        self._device = device
        self._grow(size)

    def load(self, stream: int, *pages: Sequence[int]) -> list[int]:
        """The device addresses of the lists, valid for work queued later on this raw stream. The
        device must be the current one."""
        starts = [0, *accumulate(map(len, pages))]
        count = starts.pop()
        if count > self._pinned.numel():
            self._grow(2 * count)
        there = self._ids.data_ptr()
        if count:
            pack_into(f"{count}i", self._bytes, 0, *chain.from_iterable(pages))
            here, size = self._pinned.data_ptr(), PAGE_NUMBER_BYTES * count
            code = quick().cuMemcpyHtoDAsync_v2(there, here, size, stream)
            check("cuMemcpyHtoDAsync", code)
        return [there + PAGE_NUMBER_BYTES * start for start in starts]

    def _grow(self, size: int) -> None:
        self._pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._bytes = self._pinned.numpy().data.cast("B")
        self._ids = torch.empty(size, dtype=torch.int32, device=self._device)


class _Size(ctypes.Structure):
    _names = ("cells", "halves", "heads", "run", "tile", "tiles", "chunks")
    _fields_ = tuple((name, ctypes.c_int) for name in _names)


def copy_rows(
    source: Rows,
    target: Rows,
    extent: Extent,
    *,
    kernel: Kernel,
    stream: int,
    ctas: int,
    items: tuple[int, int] = (1, 1),
) -> None:
    """Copy on a raw stream of the kernel's device, which must be the current one, with at most
    `ctas` thread blocks. It must reach source and target; all addresses, strides and sizes are
    multiples of 16 bytes, or of 16 values where the kernel converts. `items`: bytes of a value in
    source and target then."""
    from_item, to_item = items
    halves, heads, run = 2, extent.num_heads, extent.cell_bytes // from_item
    if (source.head, target.head) == (run * from_item, run * to_item):  # heads are contiguous
        heads, run = 1, heads * run
    if heads == 1 and (source.half, target.half) == (run * from_item, run * to_item):
        halves, run = 1, 2 * run  # and so are keys and values
    if any(number % _ALIGN for number in (run, source.address, target.address)):
        raise ValueError(f"runs of {run} bytes at {source.address}, {target.address}: not aligned")
    tile = _TILE if from_item == to_item else _CONVERTED
    tiles = -(-run // tile)
    chunks = extent.num_layers * extent.num_cells * halves * heads * tiles
    size = _Size(extent.num_cells, halves, heads, run, tile, tiles, chunks)
    kernel.launch(min(chunks, ctas), stream, source, target, size)


@cache
def load_copies(device: torch.device) -> Kernel:
    """The kernel of a GPU. The first call compiles and loads it, which takes longer than the
    timeout of a message."""
    bulk = torch.cuda.get_device_capability(device) >= _BULK_COPIES
    return Kernel(
        _SOURCE,
        "copy_rows",
        device,
        threads=64 if bulk else 512,
        shared_bytes=_TILE * _SLOTS if bulk else 0,
        TILE=_TILE,
        SLOTS=_SLOTS,
        NUMBER=0,
    )


@dataclass(frozen=True, slots=True)
class Conversions:
    """The kernels that make codes of numbers, and numbers of codes."""

    narrow: Kernel
    widen: Kernel


@cache
def load_conversions(device: torch.device, dtype: str) -> Conversions:
    """As `load_copies`, for numbers of this type; with bfloat16 it is one compilation."""
    defines = {"TILE": _TILE, "SLOTS": _SLOTS, "NUMBER": _NUMBERS[dtype]}
    narrow, widen = (
        Kernel(_SOURCE, name, device, threads=512, shared_bytes=0, **defines)
        for name in ("narrow_rows", "widen_rows")
    )
    return Conversions(narrow, widen)


class PoolCopies:
    """Copies between one rank's pool and other memory that its GPU reaches. `data` is contiguous,
    `[layer, block, k/v, kv_head, token, head_dim]`; codes are bytes in it."""

    def __init__(self, data: torch.Tensor, *, kernel: Kernel, ctas: int) -> None:
        _, num_blocks, _, num_heads, self._block_size, head_dim = data.shape
        page, dtype = self._block_size * head_dim * data.itemsize, str(data.dtype).split(".")[1]
        self.shape = PoolShape(num_blocks=num_blocks, num_heads=num_heads, page=page, dtype=dtype)
        self._device = data.device
        self._address = data.data_ptr()
        self._kernel = kernel
        self._ctas = ctas

    def cell_bytes(self, cells: Cells) -> int:
        """Of one head of one cell."""
        return self.shape.page * cells.size // self._block_size

    def pages(self, cells: Cells) -> Sequence[int]:
        return self.shape.pages(cells, self.cell_bytes(cells))

    def rows(self, cells: Cells, pages: int, *, first_layer: int, first_head: int) -> Rows:
        """Cells of the pool, or the later ones of them; `pages` is the device address of their page
        numbers."""
        return pool_rows(
            self._address,
            self.shape,
            first_layer=first_layer,
            first_head=first_head,
            cell_bytes=self.cell_bytes(cells),
            pages=pages,
        )

    def prepare(self, dtype: str) -> None:
        """Load what copies to or from memory with values of this type need."""
        if (numbers := self._numbers(dtype)) is not None:
            load_conversions(self._device, numbers)

    def _numbers(self, dtype: str) -> str | None:
        """The type of the numbers, where either this pool or the other has codes."""
        return next((kind for kind in {dtype, self.shape.dtype} if kind != CODES), None)

    def copy(
        self,
        source: Rows,
        target: Rows,
        extent: Extent,
        stream: torch.cuda.Stream,
        dtypes: tuple[str, str] = (CODES, CODES),
    ) -> None:
        """Queue the copy on a stream of the pool's device, which must be the current one. `dtypes`:
        of source and target; where one has codes and the other numbers, values are converted."""
        kernel, items = self._kernel, (1, 1)
        if dtypes[0] != dtypes[1]:
            narrows = dtypes[1] == CODES
            conversions = load_conversions(self._device, dtypes[0 if narrows else 1])
            kernel = conversions.narrow if narrows else conversions.widen
            items = value_bytes(dtypes[0]), value_bytes(dtypes[1])
        copy_rows(
            *(source, target, extent),
            kernel=kernel,
            stream=stream.cuda_stream,
            ctas=self._ctas,
            items=items,
        )
