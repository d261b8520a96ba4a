"""Typed wrapper of the paged copy: which bytes of a pool, and where to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kv_transfer.cuda import jit
from protocol.kv_layout import Cells

_WORD = 8
_ALIGN = 16
_TILE_WORDS = 8192
_WARPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """`[layer][block, k/v, kv_head, token, head_dim]`: `page` is the bytes of one token block of
    one head."""

    num_layers: int
    num_blocks: int
    num_heads: int
    page: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_layers * self.num_blocks * 2 * self.num_heads * self.page

    def pages(self, cells: Cells, cell_bytes: int) -> Sequence[int]:
        """Where cells begin, in multiples of what `pool_rows` steps by: a block when a cell is one,
        else a cell."""
        if cell_bytes == self.page:
            return cells.blocks
        blocks, numbers = cells.places(self.page // cell_bytes)
        step = 2 * self.num_heads * self.page // cell_bytes
        return [block * step + number for block, number in zip(blocks, numbers, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One side of a copy. `address` is that of the first layer's first page's first head named;
    strides in bytes; `pages` are page numbers on the copying device, or None when cells follow each
    other."""

    address: int
    layer: int
    page: int
    half: int
    head: int
    pages: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much one copy moves: keys and values of so many layers, cells and heads, `cell_bytes`
    each."""

    num_layers: int
    num_cells: int
    num_heads: int
    cell_bytes: int


def pool_rows(
    base: int,
    shape: PoolShape,
    *,
    first_layer: int,
    first_head: int,
    cell_bytes: int,
    pages: torch.Tensor,
) -> Rows:
    """Cells, `cell_bytes` a head, of a pool that begins at address `base`; `pages` are
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
    """Page numbers on the device, through a pinned buffer that is kept. A load overwrites the one
    before, which must not be in use any more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(2048)

    def load(self, *pages: Sequence[int]) -> list[torch.Tensor]:
        """The numbers of each list, ordered on the current stream."""
        total = sum(len(ids) for ids in pages)
        if total > self._pinned.numel():
            self._grow(2 * total)
        views = []
        first = 0
        for ids in pages:
            end = first + len(ids)
            self._view[first:end] = array("i", ids)
            views.append(self._ids[first:end])
            first = end
        self._ids[:total].copy_(self._pinned[:total], non_blocking=True)
        return views

    def _grow(self, size: int) -> None:
        self._pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._view = self._pinned.numpy()
        self._ids = torch.empty(size, dtype=torch.int32, device=self._device)


def copy_rows(
    source: Rows, target: Rows, extent: Extent, *, ctas: int, only_compile: bool = False
) -> None:
    """Copy on the current stream of the current device, with at most `ctas` thread blocks; or only
    compile the kernel for that.

    Both sides must be reachable from it and aligned to 16 bytes.
    """
    halves, heads, run = 2, extent.num_heads, extent.cell_bytes
    if source.head == target.head == run:  # heads follow each other on both sides
        heads, run = 1, heads * run
    if (
        heads == 1 and source.half == target.half == run
    ):  # keys and values follow each other on both sides
        halves, run = 1, 2 * run
    if run % _WORD or source.address % _ALIGN or target.address % _ALIGN:
        raise ValueError(f"runs of {run} bytes at {source.address}, {target.address}: not aligned")
    words = run // _WORD
    tile = min(_TILE_WORDS, _power_of_2(words))
    tiles = -(-words // tile)
    chunks = extent.num_layers * extent.num_cells * halves * heads * tiles
    grid = (min(chunks, ctas),)
    kernel = partial(jit.copy_rows.warmup, grid=grid) if only_compile else jit.copy_rows[grid]
    kernel(
        source.address,
        target.address,
        source.pages,
        target.pages,
        extent.num_cells,
        heads,
        words,
        tiles,
        chunks,
        *(stride // _WORD for stride in (source.layer, source.page, source.half, source.head)),
        *(stride // _WORD for stride in (target.layer, target.page, target.half, target.head)),
        HALVES=halves,
        SOURCE_PAGED=source.pages is not None,
        TARGET_PAGED=target.pages is not None,
        WORDS=tile,
        num_warps=_WARPS,
    )


def compile_copies(shape: PoolShape, base: int, device: torch.device, *, staged: bool) -> None:
    """Compile what copies between pools of this kind, or between one and staging buffers, may need:
    a kernel for each number of heads that a peer of 1, 2, 4 ... ranks takes. A compiler in the
    middle of a message would take longer than the message may; only a peer with blocks of another
    size costs that, once."""
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    page = shape.page
    pool = pool_rows(base, shape, first_layer=0, first_head=0, cell_bytes=page, pages=pages)
    heads = shape.num_heads
    while heads:
        extent = Extent(num_layers=1, num_cells=1, num_heads=heads, cell_bytes=page)
        dense = dense_rows(base, extent)
        for source, target in [(pool, dense), (dense, pool)] if staged else [(pool, pool)]:
            copy_rows(source, target, extent, ctas=1, only_compile=True)
        heads //= 2


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
