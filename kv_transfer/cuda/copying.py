"""Typed wrapper of the paged copy: which bytes of a pool, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_transfer.cuda import jit

_WORD = 8
_TILE_WORDS = 2048
_WARPS = 8


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


def upload(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Block ids for the kernel, ordered on the current stream."""
    return torch.tensor(blocks, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def copy_rows(
    source: Rows,
    target: Rows,
    *,
    num_layers: int,
    num_blocks: int,
    run: int,
    ctas: int,
) -> None:
    """Copy `num_layers` x `num_blocks` x 2 runs of `run` bytes on the current stream of the current
    device, with at most `ctas` thread blocks.

    Both sides must be reachable from it and aligned to 8 bytes; `run` is what is contiguous: the
    heads of one half of a block.
    """
    halves = 2
    if source.half == target.half == run:  # keys and values follow each other on both sides
        halves, run = 1, 2 * run
    if run % _WORD or source.address % _WORD or target.address % _WORD:
        raise ValueError(f"runs of {run} bytes are not aligned to {_WORD}")
    words = run // _WORD
    tile = min(_TILE_WORDS, _power_of_2(words))
    tiles = -(-words // tile)
    chunks = num_layers * num_blocks * halves * tiles
    jit.copy_rows[(min(chunks, ctas),)](
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


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
