"""Typed wrapper of the paged copy: which bytes of a pool, and where to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kv_transfer.cuda import jit

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One side of a copy. `address` is that of the first layer's first block's first head named;
    strides in bytes; `pages` are block ids on the copying device, or None when blocks follow each
    other."""

    address: int
    layer: int
    block: int
    half: int
    pages: torch.Tensor | None


def pool_rows(
    base: int, shape: PoolShape, *, first_layer: int, first_head: int, pages: torch.Tensor
) -> Rows:
    """Blocks of a pool that begins at address `base`."""
    half = shape.num_heads * shape.page
    layer = shape.num_blocks * 2 * half
    address = base + first_layer * layer + first_head * shape.page
    return Rows(address=address, layer=layer, block=2 * half, half=half, pages=pages)


def dense_rows(base: int, *, num_blocks: int, num_heads: int, page: int) -> Rows:
    """A contiguous `[layer, block, k/v, head, token, head_dim]` at address `base`."""
    half = num_heads * page
    return Rows(address=base, layer=num_blocks * 2 * half, block=2 * half, half=half, pages=None)


class PageTable:
    """Block ids on the device, through a pinned buffer that is kept. A load overwrites the one
    before, which must not be in use any more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(2048)

    def load(self, *blocks: Sequence[int]) -> list[torch.Tensor]:
        """The ids of each list, ordered on the current stream."""
        total = sum(len(ids) for ids in blocks)
        if total > self._pinned.numel():
            self._grow(2 * total)
        views = []
        first = 0
        for ids in blocks:
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
    source: Rows,
    target: Rows,
    *,
    num_layers: int,
    num_blocks: int,
    run: int,
    ctas: int,
    only_compile: bool = False,
) -> None:
    """Copy `num_layers` x `num_blocks` x 2 runs of `run` bytes on the current stream of the current
    device, with at most `ctas` thread blocks; or only compile the kernel for that.

    Both sides must be reachable from it and aligned to 16 bytes; `run` is what is contiguous: the
    heads of one half of a block.
    """
    halves = 2
    if source.half == target.half == run:  # keys and values follow each other on both sides
        halves, run = 1, 2 * run
    if run % _WORD or source.address % _ALIGN or target.address % _ALIGN:
        raise ValueError(f"runs of {run} bytes at {source.address}, {target.address}: not aligned")
    words = run // _WORD
    tile = min(_TILE_WORDS, _power_of_2(words))
    tiles = -(-words // tile)
    chunks = num_layers * num_blocks * halves * tiles
    grid = (min(chunks, ctas),)
    kernel = partial(jit.copy_rows.warmup, grid=grid) if only_compile else jit.copy_rows[grid]
    kernel(
        source.address,
        target.address,
        source.pages,
        target.pages,
        num_blocks,
        words,
        tiles,
        chunks,
        *(stride // _WORD for stride in (source.layer, source.block, source.half)),
        *(stride // _WORD for stride in (target.layer, target.block, target.half)),
        HALVES=halves,
        SOURCE_PAGED=source.pages is not None,
        TARGET_PAGED=target.pages is not None,
        WORDS=tile,
        num_warps=_WARPS,
    )


def compile_copies(shape: PoolShape, base: int, device: torch.device, *, staged: bool) -> None:
    """Compile what copies between pools of this kind, or between one and staging buffers, may need:
    a kernel for each number of heads that a peer of 1, 2, 4 ... ranks takes. A compiler in the
    middle of a message would take longer than the message may."""
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    pool = pool_rows(base, shape, first_layer=0, first_head=0, pages=pages)
    heads = shape.num_heads
    while heads:
        dense = dense_rows(base, num_blocks=1, num_heads=heads, page=shape.page)
        for source, target in [(pool, dense), (dense, pool)] if staged else [(pool, pool)]:
            copy_rows(
                source,
                target,
                num_layers=1,
                num_blocks=1,
                run=heads * shape.page,
                ctas=1,
                only_compile=True,
            )
        heads //= 2


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
