"""Typed wrappers of the paged attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton

from engine.kernels.jit.decode_attention import merge_parts, paged_decode
from engine.kernels.jit.mixed_attention import mixed_chunks, mixed_decodes
from engine.kernels.jit.prefill_attention import (
    gather_history as gather_history_kernel,
)
from engine.kernels.jit.prefill_attention import (
    merge_attention as merge_attention_kernel,
)
from engine.kernels.jit.prefill_attention import (
    paged_prefill,
)
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.launch import Repeated

Ints = np.ndarray[Any, np.dtype[np.int32]]

_PAGED_PREFILL = Repeated(paged_prefill)
_GATHER_HISTORY = Repeated(gather_history_kernel)
_MERGE_ATTENTION = Repeated(merge_attention_kernel)

#: Programs that run at once on a Hopper card: four on each of 132 multiprocessors.
_WAVE = 528
_MAX_SPLITS = 128
#: The most splits that the last of them merges: each two wait for memory once more.
_MERGED_WITHIN = 8
#: What the kernel is compiled for then: made for less it is slower (128 sequences of 640 tokens:
#: 86 us on an H200 with 4 or 8, 83.6 with 16).
_MERGE_ROOM = 16
#: Splits whose parts are on their way together when they are merged. More of them take registers
#: from the whole kernel: 32 sequences on an H200 take 26.6 us with 2, 32.3 with 16.
_AT_ONCE = 2
#: Dims of a head that one program of the merging kernel takes, and the splits that it is compiled
#: for: few sequences need many programs to be quick, of many sequences (8) each program costs.
_PIECE = 32
_MANY, _MANY_PIECE, _MANY_SPLITS = 8, 128, 32
#: Sequences times splits where one context may be much longer than the others.
_LONG_PARTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """How decode attention is cut: splits of a context, tokens per tile, least tiles per split."""

    splits: int
    tile: int = 64
    min_tiles: int = 1
    stages: int = 3
    warps: int = 2

    @property
    def apart(self) -> bool:
        """Whether a kernel of its own merges what the splits gave, instead of the last of them."""
        return self.splits > _MERGED_WITHIN


def decode_shape(batch: int, kv_heads: int, head_dim: int, long_context: bool) -> DecodeShape:
    """Splits for a batch: enough programs to fill the card, more where one context may be long.

    Tile, stages and warps are the best of those measured on an H100 over contexts of 512 to 32,768
    tokens and batches of 1 to 256, splits on an H200.
    """
    splits = min(_MAX_SPLITS, max(1, _WAVE // (batch * kv_heads)))
    min_tiles = 1
    if long_context and splits < 32:
        splits = max(splits, min(32, _LONG_PARTS // batch))
        min_tiles = 16
    return DecodeShape(
        splits=splits,
        tile=64 if head_dim <= 128 else 32,
        min_tiles=min_tiles,
        stages=2 if batch == 1 and not long_context else 3,
    )


class DecodeScratch:
    """Partial results of splits, shared by all layers: they run one after another on one stream.

    parts: the largest product of batch and splits that will use it.
    """

    def __init__(
        self, batch: int, parts: int, num_heads: int, head_dim: int, device: torch.device
    ) -> None:
        rows = parts * num_heads
        width = triton.next_power_of_2(head_dim)
        self.partial = torch.empty(rows * width, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(batch * num_heads, dtype=torch.int32, device=device)


def decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    indptr: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    shape: DecodeShape,
    *,
    num_heads: int,
    scale: float,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Rotate and store each row's new token, then attend over its whole paged context.

    qkv: `[batch, (heads + 2 kv_heads) * dim]` straight from the projection; pool: one layer,
    `[block, 2, kv_heads, page, dim]`; row b's blocks are blocks[indptr[b]:], its context of
    lengths[b] tokens includes the new one; length 0 marks padding. out: `[batch, heads * dim]`.
    """
    _, _, kv_heads, page, dim = pool.shape
    group = num_heads // kv_heads
    paged_decode[(kv_heads, qkv.shape[0], shape.splits)](
        qkv,
        cos,
        sin,
        pool,
        indptr,
        blocks,
        lengths,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        scale,
        shape.splits,
        shape.min_tiles,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_P=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        PAGE=page,
        TILE=shape.tile,
        MERGE_P=triton.next_power_of_2(group),
        MAX_SPLITS=_MERGE_ROOM,
        AT_ONCE=_AT_ONCE,
        APART=shape.apart,
        STAGES=shape.stages,
        PDL=pdl,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=shape.warps,
        **launch_options(pdl),
    )
    if shape.apart:
        _merge(lengths, scratch, shape, pool, num_heads, out, pdl=pdl)


def _merge(
    lengths: torch.Tensor,
    scratch: DecodeScratch,
    shape: DecodeShape,
    pool: torch.Tensor,
    num_heads: int,
    out: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    _, _, kv_heads, _, dim = pool.shape
    width = triton.next_power_of_2(dim)
    piece, room = _PIECE, _MAX_SPLITS
    if out.shape[0] >= _MANY:
        piece, room = _MANY_PIECE, max(_MANY_SPLITS, triton.next_power_of_2(shape.splits))
    piece = min(width, piece)
    merge_parts[(num_heads, width // piece, out.shape[0])](
        scratch.partial,
        scratch.stats,
        lengths,
        out,
        shape.splits,
        shape.min_tiles,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_P=width,
        TILE=shape.tile,
        PIECE=piece,
        MAX_SPLITS=room,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


#: Integers that describe one query tile to the kernel.
TILE_FIELDS = 12  # the last three are unused: tiles begin at multiples of 16 bytes
#: Programs of chunk attention: one on each multiprocessor of a Hopper card.
CHUNK_WAVE = 132
#: Queries of a tile in a mixed step, and rows of one in which chunks are not most of the work.
MIXED_TILE, _FEW_ROWS = 64, 144
#: Parts of contexts begin at multiples of this, and of every kernel's tile of keys.
_PART_STEP = 64
#: Least context tokens of a part of a query tile.
_MIN_PART = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """New tokens of one sequence: rows first_row .. + count, positions start ..; its block table
    begins at `table` in the step's blocks. Context tokens before `begin` are left out, and, where
    `end` is given, those from `end` on."""

    first_row: int
    count: int
    start: int
    table: int
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Query tiles of chunk attention: int32 `[tiles, TILE_FIELDS]`, the longest first, and whether
    any is cut into parts (`split`)."""

    tiles: Ints
    split: bool


def query_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Queries of one tile."""
    return 64 if dtype == torch.float32 or head_dim > 128 else 128


def _context_tile(dtype: torch.dtype, head_dim: int) -> int:
    return 32 if dtype == torch.float32 or head_dim > 128 else 64


def max_parts(heads: int) -> int:
    """Parts of all tiles of a plan together, at most."""
    return max(2, 4 * CHUNK_WAVE // heads)


def plan_tiles(
    spans: Sequence[ChunkSpan], heads: int, rows: int, *, wave: int = CHUNK_WAVE
) -> TilePlan:
    """Cut chunks into tiles of `rows` queries, and their contexts into parts where the tiles of all
    heads are fewer than the `wave` of programs that run at once; 0: no parts."""
    whole = [
        (span, first, min(rows, span.count - first), _end(span, first, rows))
        for span in spans
        for first in range(0, span.count, rows)
    ]
    total = sum(end - span.begin for span, _, _, end in whole)
    fair = max(_MIN_PART, total * heads / max(1, wave))
    room, slot = max_parts(heads), 0
    tiles: list[tuple[int, ...]] = []
    for span, first, count, end in whole:
        parts = max(1, round((end - span.begin) / fair))
        if slot + parts > room or not wave:
            parts = 1
        last = min(span.start + first, end) - span.begin  # the last part sees the first query
        cuts = sorted(
            {span.begin + last * i // parts // _PART_STEP * _PART_STEP for i in range(parts)}
        )
        fields = span.first_row + first, count, span.start + first, span.table
        for part, (begin, stop) in enumerate(pairwise((*cuts, end))):
            tiles.append((*fields, begin, stop, slot, part, len(cuts), 0, 0, 0))
        slot += len(cuts) if len(cuts) > 1 else 0
    tiles.sort(key=lambda tile: tile[4] - tile[5])
    table = np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)
    return TilePlan(tiles=table, split=slot > 0)


def _end(span: ChunkSpan, first: int, rows: int) -> int:
    if span.end is not None:
        return span.end
    return span.start + min(first + rows, span.count)


def mixed_wave(rows: int, decodes: int) -> int:
    """Programs of chunk attention that are to run at once in a mixed step of so many rows: beside
    decode rows, one on a multiprocessor leaves room for three of theirs; where chunks are most of
    the work, or all, two share it (measured on an H200, docs/adr/0036)."""
    return CHUNK_WAVE if decodes and rows <= _FEW_ROWS else 2 * CHUNK_WAVE


class ChunkScratch:
    """Partial results of tiles that are cut into parts, shared by all layers."""

    def __init__(
        self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = max_parts(num_heads) * num_heads * query_tile(dtype, head_dim)
        width = triton.next_power_of_2(head_dim)
        self.partial = torch.empty(rows * width, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)
        slots = max_parts(num_heads) * num_heads
        self.counters = torch.zeros(slots, dtype=torch.int32, device=device)


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    tiles: torch.Tensor,
    blocks: torch.Tensor,
    scratch: ChunkScratch,
    *,
    split: bool,
    num_heads: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Causal attention of every chunk's rotated queries over its paged context.

    q: rows of at least heads * dim values (a slice of the qkv rows will do), out likewise; the
    chunks' own keys and values are in the pool already. tiles: int32 `[n, TILE_FIELDS]`, of which
    those without queries are skipped; split: whether any of them may be a part. lse: float32
    `[rows, heads]` for the logarithms of the softmax sums.
    """
    _, _, kv_heads, page, dim = pool.shape
    block_m = query_tile(q.dtype, dim)
    full = q.dtype == torch.float32
    _PAGED_PREFILL[(num_heads, tiles.shape[0])](
        q,
        q.stride(0),
        pool,
        tiles,
        blocks,
        out,
        out.stride(0),
        scratch.partial,
        scratch.stats,
        scratch.counters,
        scratch.stats if lse is None else lse,
        scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        PAGE=page,
        BLOCK_M=block_m,
        TILE=_context_tile(q.dtype, dim),
        FIELDS=TILE_FIELDS,
        SPLIT=split,
        LSE=lse is not None,
        STAGES=2 if full else 3,
        PRECISION="ieee" if full else "tf32",
        num_warps=8 if block_m == 128 else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRows:
    """What attention of a mixed step reads from device memory, all int32: counts `[4]` (tiles,
    decode rows, splits of a decode row, least tiles of a split), the chunks' tiles and blocks, and
    the decode rows' indptr, blocks and lengths."""

    counts: torch.Tensor
    tiles: torch.Tensor
    tile_blocks: torch.Tensor
    indptr: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor


def mixed_splits(rows: int, kv_heads: int, long_context: bool, room: int) -> tuple[int, int]:
    """(splits, least tiles of a split) of so many decode rows beside chunks; `room`: the programs
    that they may be."""
    pairs = max(1, rows * kv_heads)
    if long_context:
        return max(1, min(_MERGED_WITHIN, room // pairs)), 16
    return max(1, min(_MERGED_WITHIN, room // pairs, _WAVE // pairs)), 1


def mixed_chunk_attention(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    rows: MixedRows,
    scratch: ChunkScratch,
    *,
    programs: int,
    num_heads: int,
    scale: float,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Attention of the chunks of a step by `programs` programs, at least heads * tiles.

    The chunks' rows of qkv `[rows, (heads + 2 kv_heads) * dim]` are rotated, and their KV is in the
    pool. Other rows of out `[rows, heads * dim]` are left alone.
    """
    _, _, kv_heads, page, dim = pool.shape
    mixed_chunks[(programs,)](
        qkv,
        pool,
        rows.counts,
        rows.tiles,
        rows.tile_blocks,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        PAGE=page,
        BLOCK_M=MIXED_TILE,
        TILE=_context_tile(qkv.dtype, dim),
        FIELDS=TILE_FIELDS,
        STAGES=2,
        PDL=pdl,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=4,
        **launch_options(pdl),
    )


def mixed_decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    rows: MixedRows,
    scratch: DecodeScratch,
    *,
    programs: int,
    num_heads: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of the decode rows of a step, the first of qkv, straight from the projection, by
    `programs` programs, at least KV heads * rows * splits. Other rows of out are left alone."""
    _, _, kv_heads, page, dim = pool.shape
    group = num_heads // kv_heads
    mixed_decodes[(programs,)](
        qkv,
        cos,
        sin,
        pool,
        rows.counts,
        rows.indptr,
        rows.blocks,
        rows.lengths,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_P=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        PAGE=page,
        TILE=64 if dim <= 128 else 32,
        MERGE_P=triton.next_power_of_2(group),
        MAX_SPLITS=_MERGE_ROOM,
        AT_ONCE=_AT_ONCE,
        STAGES=3,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=2,
    )


def gather_history(pool: torch.Tensor, blocks: torch.Tensor, *, out: torch.Tensor) -> None:
    """out `[2, kv_heads, tokens, dim]` = the keys and values of `blocks` in one layer."""
    _, _, kv_heads, page, dim = pool.shape
    _GATHER_HISTORY[(blocks.shape[0], 2 * kv_heads)](
        pool,
        blocks,
        out,
        PLANES=2 * kv_heads,
        CELLS=page * dim,
        CELLS_P=triton.next_power_of_2(page * dim),
        num_warps=4,
    )


def merge_attention(
    acc: torch.Tensor,
    acc_lse: torch.Tensor,
    part: torch.Tensor,
    lse: torch.Tensor,
    *,
    first: bool,
    out: torch.Tensor | None,
) -> None:
    """Fold part `[rows, heads, dim]`, whose softmax sums have the logarithms lse `[rows, heads]`,
    into acc and acc_lse, float32 of the same shapes; into `out` `[rows, heads * dim]` instead, when
    it is the last. `first`: acc holds nothing yet."""
    rows, heads, dim = part.shape
    _MERGE_ATTENTION[(rows,)](
        acc,
        acc_lse,
        part,
        part.stride(0),
        part.stride(1),
        lse,
        lse.stride(0),
        lse.stride(1),
        acc if out is None else out,
        0 if out is None else out.stride(0),
        HEADS=heads,
        HEADS_P=triton.next_power_of_2(heads),
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        FIRST=first,
        LAST=out is not None,
        num_warps=4,
    )
