"""Typed wrappers of attention of prompt chunks, and the plan of its query tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from engine.kernels.jit import prefill_attention as kernels
from engine.kernels.triton.attention import ScoreRule, head_sizes
from engine.kernels.triton.launch import Repeated, power_of_2
from engine.kernels.triton.splits import Ints

_PAGED_PREFILL = Repeated(kernels.paged_prefill)
_GATHER_HISTORY = Repeated(kernels.gather_history)
_MERGE_ATTENTION = Repeated(kernels.merge_attention)

#: Integers that describe one query tile to the kernel.
TILE_FIELDS = 12  # the last three are unused: tiles begin at multiples of 16 bytes
#: Programs of chunk attention: one on each multiprocessor of a Hopper card.
CHUNK_WAVE = 132
#: Queries of a tile in a mixed step, and rows of one in which chunks are not most of the work.
MIXED_TILE, _FEW_ROWS = 64, 144
#: Parts of contexts begin a multiple of this behind the first, which each tile of keys divides.
_PART_STEP = 64
#: Least context tokens of a part of a query tile.
_MIN_PART = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """New tokens of one sequence: rows first_row .. + count, positions start ..; block 0 of its
    sequence would be at `table` in the step's blocks. Context tokens before `begin` are left out,
    and, where `end` is given, those from `end` on."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """How a launch is cut: queries and context tokens of a tile, pipeline stages, warps."""

    queries: int
    keys: int
    stages: int = 2
    warps: int = 4


#: Of large steps: in float32, with heads of more than 128 dims, with others.
_FLOAT32 = ChunkShape(queries=64, keys=32)
_WIDE = ChunkShape(queries=128, keys=64, warps=8)
_NARROW = ChunkShape(queries=128, keys=64, stages=3, warps=8)


def chunk_shape(dtype: torch.dtype, head_dim: int) -> ChunkShape:
    """That of steps that no graph serves."""
    if dtype == torch.float32:
        return _FLOAT32
    return _WIDE if head_dim > 128 else _NARROW


def mixed_shape(dtype: torch.dtype, head_dim: int) -> ChunkShape:
    """That of mixed steps."""
    return ChunkShape(
        queries=MIXED_TILE, keys=32 if dtype == torch.float32 or head_dim > 128 else 64
    )


def max_parts(heads: int) -> int:
    """Parts of all tiles of a plan together, at most."""
    return max(2, 4 * CHUNK_WAVE // heads)


def plan_tiles(
    spans: Sequence[ChunkSpan],
    heads: int,
    rows: int,
    *,
    wave: int = CHUNK_WAVE,
    window: int = 0,
) -> TilePlan:
    """Cut chunks into tiles of `rows` queries, and their contexts into parts where the tiles of all
    heads are fewer than the `wave` of programs that run at once; 0: no parts. With a window a tile
    attends to what its queries see."""
    whole = [
        (span, first, min(rows, span.count - first), *_context(span, first, rows, window))
        for span in spans
        for first in range(0, span.count, rows)
    ]
    total = sum(end - begin for *_, begin, end in whole)
    fair = max(_MIN_PART, total * heads / max(1, wave))
    room, slot = max_parts(heads), 0
    tiles: list[tuple[int, ...]] = []
    for span, first, count, start, end in whole:
        parts = max(1, round((end - start) / fair))
        if slot + parts > room or not wave:
            parts = 1
        last = min(span.start + first, end) - start  # the last part sees the first query
        cuts = sorted({start + last * i // parts // _PART_STEP * _PART_STEP for i in range(parts)})
        fields = span.first_row + first, count, span.start + first, span.table
        for part, (begin, stop) in enumerate(pairwise((*cuts, end))):
            tiles.append((*fields, begin, stop, slot, part, len(cuts), 0, 0, 0))
        slot += len(cuts) if len(cuts) > 1 else 0
    tiles.sort(key=lambda tile: tile[4] - tile[5])
    table = np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)
    return TilePlan(tiles=table, split=slot > 0)


def _context(span: ChunkSpan, first: int, rows: int, window: int) -> tuple[int, int]:
    """The context tokens that a tile attends to."""
    begin = max(span.begin, span.start + first - window + 1) if window else span.begin
    if span.end is not None:
        return begin, span.end
    return begin, span.start + min(first + rows, span.count)


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
        queries = max(MIXED_TILE, chunk_shape(dtype, head_dim).queries)
        slots = max(4 * CHUNK_WAVE, 2 * num_heads)  # whichever heads share a tile (`max_parts`)
        rows = slots * queries
        width = power_of_2(head_dim)
        self.partial = torch.empty(rows * width, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(slots, dtype=torch.int32, device=device)


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    tiles: torch.Tensor,
    blocks: torch.Tensor,
    scratch: ChunkScratch,
    rule: ScoreRule,
    shape: ChunkShape,
    *,
    split: bool,
    num_heads: int,
    out: torch.Tensor,
    counts: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Causal attention of every chunk's rotated and normed queries over its paged context.

    q: rows of at least heads * dim values (a slice of the qkv rows will do), out likewise; the
    chunks' own keys and values are in the pool already. tiles: int32 `[n, TILE_FIELDS]`, of which
    those without queries are skipped, with at most `shape.queries` each; split: whether any of them
    may be a part. counts: of a mixed step, int32 `[1]`, the number of tiles. lse: float32
    `[rows, heads]` for the logarithms of the softmax sums.
    """
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
        scratch.counters if counts is None else counts,
        scratch.stats if lse is None else lse,
        rule.scale,
        **head_sizes(pool, num_heads),
        BLOCK_M=shape.queries,
        TILE=shape.keys,
        FIELDS=TILE_FIELDS,
        SPLIT=split,
        MIXED=counts is not None,
        LSE=lse is not None,
        STAGES=shape.stages,
        **rule.constants(),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=shape.warps,
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
        CELLS_P=power_of_2(page * dim),
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
        HEADS_P=power_of_2(heads),
        DIM=dim,
        DIM_P=power_of_2(dim),
        FIRST=first,
        LAST=out is not None,
        num_warps=4,
    )
