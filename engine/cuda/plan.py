"""A step in device order, as frozen values: decode rows first, prompt chunks behind them, and how
its attention is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from engine.batch import SequenceStep, StepBatch
from engine.cpu.inputs import StepLimits, check_step
from engine.cuda.options import StepShape, is_large
from engine.kernels.logprobs import LogprobRows
from engine.kernels.sampling import Penalties, TokenMasks
from engine.kernels.triton.prefill_attention import (
    CHUNK_WAVE,
    MIXED_TILE,
    ChunkSpan,
    mixed_wave,
    plan_tiles,
)
from engine.kernels.triton.splits import Ints
from engine.kernels.triton.windowed_prefill import plan_window
from protocol.errors import Internal
from protocol.kv_layout import KVGroup

#: Contexts longer than this get more splits of decode attention in small batches.
LONG_CONTEXT = 4096
#: Chunks of at least this many tokens are worth an attention call of their own, or tiles of
#: `windowed_prefill`; without history those of fewer tokens, too.
DENSE_TOKENS, LEAST_TOKENS = 1024, 128
#: Their lengths are rounded up to this, so that few plans of such a call exist.
DENSE_STEP = 512
#: History of a mean token of a large step beyond which such calls save more than its graph.
FAR_HISTORY = 2048
#: The field of a query tile that says where its block table is.
_TILE_TABLE = 3
#: Lengths of the segments of a long chunk's history that have such a call.
HISTORY_SEGMENTS = (8192, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits(StepLimits):
    """What a step may hold, too. `pinned`: its plans go to a GPU."""

    max_batch: int
    max_chunk_tokens: int
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A checked batch in device order.

    decodes, chunks: the sequences; feeds[r]: the row of the step before whose token decode row r
    runs, or -1; chunk_ids: the chunks' tokens; *_blocks: how many blocks hold the tokens of each
    sequence, in a group without a window; chunk_order: the chunks' numbers in the batch. sampled:
    the sequences of the logits' rows (every decode row, then the chunks that sample); results[i]:
    the logits row of sequence i of the batch, or None. banned: (logits row, token id) pairs. masks:
    logits rows with few allowed tokens, if any. penalties: other changes of the logits, if any.
    logprobs, scored: sampled tokens and targets whose log-probabilities are wanted, if any. layout:
    of a step with chunks, where its engine has made one. splits: of the decode rows' contexts in
    each KV group, where each is cut by itself (`plan_splits`).
    """

    decodes: list[SequenceStep]
    feeds: list[int]
    decode_blocks: list[int]
    chunks: list[SequenceStep]
    chunk_ids: list[np.ndarray[Any, np.dtype[np.int64]]]
    chunk_blocks: list[int]
    chunk_order: list[int]
    sampled: list[SequenceStep]
    results: list[int | None]
    banned: list[tuple[int, int]]
    penalties: Penalties | None
    masks: TokenMasks | None
    logprobs: LogprobRows | None
    scored: LogprobRows | None
    filtered: bool
    long_context: bool
    layout: ChunkLayout | None = None
    splits: tuple[Ints, ...] = ()


def plan_step(batch: StepBatch, limits: BatchLimits, previous: list[int | None]) -> StepPlan:
    """Check and order a batch. `previous` is `results` of the step before.

    Raises Internal when something is out of range: schedulers never plan that, and nothing may be
    read or written outside the pool.
    """
    order = list(range(len(batch.sequences)))
    decode_order = [i for i in order if _is_decode(batch.sequences[i])]
    chunk_order = [i for i in order if not _is_decode(batch.sequences[i])]
    decodes = [batch.sequences[i] for i in decode_order]
    chunks = [batch.sequences[i] for i in chunk_order]
    chunk_ids = [np.array(step.tokens, np.int64) for step in chunks]
    decode_blocks = [check_step(step, limits) for step in decodes]
    chunk_blocks = [
        check_step(step, limits, ids) for step, ids in zip(chunks, chunk_ids, strict=True)
    ]
    _check_totals(decodes, chunks, limits)
    results: list[int | None] = [None] * len(order)
    for row, i in enumerate(decode_order):
        results[i] = row if batch.sequences[i].sampling is not None else None
    sampling_chunks = [i for i in chunk_order if batch.sequences[i].sampling is not None]
    for row, i in enumerate(sampling_chunks, start=len(decodes)):
        results[i] = row
    sampled_order = decode_order + sampling_chunks
    sampled = [batch.sequences[i] for i in sampled_order]
    return StepPlan(
        decodes=decodes,
        feeds=[_feed(step, previous) for step in decodes],
        decode_blocks=decode_blocks,
        chunks=chunks,
        chunk_ids=chunk_ids,
        chunk_blocks=chunk_blocks,
        chunk_order=chunk_order,
        sampled=sampled,
        results=results,
        banned=[(row, token) for row, step in enumerate(sampled) for token in step.banned],
        penalties=Penalties.build(sampled, pinned=limits.pinned),
        masks=TokenMasks.build([step.allowed for step in sampled], pinned=limits.pinned),
        logprobs=LogprobRows.of_sampled(list(zip(sampled_order, sampled, strict=True))),
        scored=LogprobRows.of_targets(list(zip(chunk_order, chunks, strict=True))),
        filtered=any(step.sampling is not None and step.sampling.filtered for step in sampled),
        long_context=any(step.start >= LONG_CONTEXT for step in decodes),
    )


def _is_decode(step: SequenceStep) -> bool:
    """Whether it runs in a row of its own; what is scored needs its hidden states, as chunks do."""
    return len(step.tokens) == 1 and not step.targets


def _feed(step: SequenceStep, previous: list[int | None]) -> int:
    if step.previous is None:
        return -1
    row = previous[step.previous] if 0 <= step.previous < len(previous) else None
    if row is None:
        raise Internal(f"sequence {step.previous} of the step before sampled nothing to go on from")
    return row


def _check_totals(
    decodes: list[SequenceStep], chunks: list[SequenceStep], limits: BatchLimits
) -> None:
    if len(decodes) + len(chunks) > limits.max_batch:
        raise Internal(f"more than {limits.max_batch} sequences in one step")
    tokens = sum(len(step.tokens) for step in chunks)
    if tokens > limits.max_chunk_tokens:
        raise Internal(f"{tokens} prompt tokens in one step, at most {limits.max_chunk_tokens}")


def dense_length(count: int) -> int:
    """The length that a dense chunk of `count` tokens is computed at."""
    return -(-count // DENSE_STEP) * DENSE_STEP


def history_segments(start: int) -> tuple[int, ...]:
    """Lengths of the segments that a history of `start` tokens begins with; the rest is shorter
    than the shortest."""
    lengths: list[int] = []
    for length in HISTORY_SEGMENTS:
        count, start = divmod(start, length)
        lengths += [length] * count
    return tuple(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Where a chunk's table of one KV group lies among the step's blocks: `count` of them from
    number `number` of the sequence on."""

    first: int
    count: int
    number: int = 0

    @property
    def origin(self) -> int:
        """Where block 0 of the sequence would be."""
        return self.first - self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseChunk:
    """A long chunk in rows first .. + count, attended to by calls of its own: one for its own
    tokens, one for each of `segments` of its history, whose blocks begin at `table`; query tiles
    `tiles` attend to the rest of the history."""

    first: int
    count: int
    table: int
    segments: tuple[int, ...]
    tiles: range


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCut:
    """How attention in the layers of one KV group is cut into query tiles and calls.

    Without a graph, attention is launched by kind: query tiles `paged` in one launch, which are cut
    into parts where `split`, tiles `windowed` in another (`plan_window`), and the `dense` chunks
    one after another. ends: tiles of the chunks' last tokens, where the model's last layer has
    nothing else to attend for; None where it has.
    """

    tiles: Ints
    paged: range = range(0)
    split: bool = False
    windowed: range = range(0)
    dense: tuple[DenseChunk, ...] = ()
    ends: range | None = None

    def at(self, tables: tuple[BlockTable, ...]) -> GroupCut:
        """The same where tiles and chunks name their block table by its number in `tables`."""
        tiles = self.tiles.copy()
        origins = np.array([table.origin for table in tables], np.int32)
        tiles[:, _TILE_TABLE] = origins[tiles[:, _TILE_TABLE]]
        dense = tuple(replace(chunk, table=tables[chunk.table].first) for chunk in self.dense)
        return replace(self, tiles=tiles, dense=dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The rows of a step with prompt chunks: decode rows, then the chunks'.

    shape: the CUDA graph that serves the step, if any does. first_rows: of each chunk. kept: rows
    whose logits are wanted, then the scored ones. tables, cuts: of each KV group, tables of each
    chunk.
    """

    shape: StepShape | None
    rows: int
    first_rows: tuple[int, ...]
    tables: tuple[tuple[BlockTable, ...], ...]
    num_blocks: int
    kept: tuple[int, ...]
    cuts: tuple[GroupCut, ...]

    @property
    def padded_rows(self) -> int:
        """Rows that the forward pass computes."""
        return self.rows if self.shape is None else self.shape.rows

    @property
    def overhang(self) -> int:
        """Rows behind the last one that calls of dense chunks read."""
        dense = (chunk for cut in self.cuts for chunk in cut.dense)
        ends = (chunk.first + dense_length(chunk.count) for chunk in dense)
        return max(0, max(ends, default=0) - self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlanner:
    """Lays out the attention of steps with chunks, for one engine.

    groups: KV groups of blocks of `block_size` tokens. tile: queries of a tile where no graph
    serves the step; dense: whether long chunks may have calls of their own, in layers that attend
    to everything; windowed: whether those with a window have a kernel for such chunks; own_tokens:
    chunks without history of up to so many tokens have it in the others, too. packed_tokens: of a
    tile that heads share, in steps with graphs and layers without a window; or 0. last: the group
    of the model's last layer, of whose output only the rows that are kept are used. others: what
    ranks with other numbers of heads have; all choose the same graph.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    heads: int
    kv_heads: int
    tile: int
    dense: bool
    windowed: bool = False
    own_tokens: int = 0
    packed_tokens: int = 0
    last: int | None = None
    others: tuple[AttentionPlanner, ...] = ()

    def lay_out(self, plan: StepPlan, shapes: tuple[StepShape, ...]) -> ChunkLayout:
        """Lay out a step. shapes: those that have graphs, ascending."""
        decodes = len(plan.decodes)
        counts = [len(step.tokens) for step in plan.chunks]
        *first_rows, rows = accumulate(counts, initial=decodes)
        tables, num_blocks = self._tables(plan)
        chunks = list(zip(plan.chunks, first_rows, counts, strict=True))
        sampled = [first + n - 1 for step, first, n in chunks if step.sampling is not None]
        scored = [first + i for step, first, _ in chunks for i in range(len(step.targets))]
        spans = [
            ChunkSpan(first_row=first, count=n, start=step.start, table=index)
            for index, (step, first, n) in enumerate(chunks)
        ]
        windows = tuple(group.window for group in self.groups)
        shape, cuts = None, None
        history = sum(step.start * n for step, _, n in chunks)
        far = is_large(rows) and history > FAR_HISTORY * rows
        if not (scored or far) and shapes and rows <= shapes[-1].rows:
            samples = decodes + len(sampled)
            shape, cuts = self._mixed(plan, spans, shapes, rows, samples)
        if cuts is None:
            cuts = {window: self._by_kind(spans, window) for window in dict.fromkeys(windows)}
            if self.last is not None and not scored:
                window = windows[self.last]
                cuts[window] = self._with_ends(cuts[window], plan, spans, window)
        return ChunkLayout(
            shape=shape,
            rows=rows,
            first_rows=tuple(first_rows),
            tables=tables,
            num_blocks=num_blocks,
            kept=(*range(decodes), *sampled, *scored),
            cuts=tuple(cuts[w].at(table) for w, table in zip(windows, tables, strict=True)),
        )

    def _tables(self, plan: StepPlan) -> tuple[tuple[tuple[BlockTable, ...], ...], int]:
        """Where the tables lie, group after group, each at a multiple of 16 bytes."""
        tables, end = [], 0
        for group in self.groups:
            row = []
            for step, total in zip(plan.chunks, plan.chunk_blocks, strict=True):
                number = group.first_token(step.start) // self.block_size
                row.append(BlockTable(first=end, count=total - number, number=number))
                end += -(-(total - number) // 4) * 4
            tables.append(tuple(row))
        return tuple(tables), end

    def _mixed(
        self,
        plan: StepPlan,
        spans: list[ChunkSpan],
        shapes: tuple[StepShape, ...],
        rows: int,
        samples: int,
    ) -> tuple[StepShape | None, dict[int | None, GroupCut] | None]:
        """The smallest shape that holds the step, and a cut for each window; None if none does."""
        decodes, ranks = len(plan.decodes), (self, *self.others)
        windows = dict.fromkeys(group.window for group in self.groups)
        own, *others = (
            {window: one.mixed_tiles(spans, window, rows, decodes) for window in windows}
            for one in ranks
        )
        programs = max(each * len(tiles) for cut in (own, *others) for tiles, each in cut.values())
        decode_programs = max(one.kv_heads for one in ranks) * decodes
        for shape in shapes:
            if shape.holds(rows, samples, programs, decode_programs):
                return shape, {window: GroupCut(tiles=tiles) for window, (tiles, _) in own.items()}
        return None, None

    def mixed_tiles(
        self, spans: list[ChunkSpan], window: int | None, rows: int, decodes: int
    ) -> tuple[Ints, int]:
        """Query tiles of a step with a graph, and the programs that each has to have."""
        if self.packed_tokens and not window:  # a program takes many tiles
            return plan_tiles(spans, self.kv_heads, self.packed_tokens).tiles, 0
        tile, wave = MIXED_TILE, mixed_wave(rows, decodes)
        if is_large(rows):
            tile, wave = self.tile, CHUNK_WAVE
        return plan_tiles(spans, self.heads, tile, wave=wave, window=window or 0).tiles, self.heads

    def _with_ends(
        self, cut: GroupCut, plan: StepPlan, spans: list[ChunkSpan], window: int | None
    ) -> GroupCut:
        ends = [
            replace(span, first_row=span.first_row + more, count=1, start=span.start + more)
            for step, span in zip(plan.chunks, spans, strict=True)
            for more in (span.count - 1,)
            if step.sampling is not None
        ]
        tiles = np.concatenate(
            (cut.tiles, plan_tiles(ends, self.heads, self.tile, window=window or 0).tiles)
        )
        return replace(cut, tiles=tiles, ends=range(len(cut.tiles), len(tiles)))

    def _by_kind(self, spans: list[ChunkSpan], window: int | None) -> GroupCut:
        short, own, long = [], [], []
        for span in spans:
            if self._has_kernel(span, window):
                plan = plan_window(span, window or 0, self.heads // self.kv_heads)
                short += plan.paged
                own.append(plan.tiles)
            elif self.dense and window is None and span.count >= DENSE_TOKENS:
                long.append(span)
            else:
                short.append(span)
        paged = plan_tiles(short, self.heads, self.tile, window=window or 0)
        tiles = [paged.tiles, *own]
        first = at = sum(map(len, tiles))
        chunks = []
        for span in long:
            segments = history_segments(span.start)
            if sum(segments) < span.start:
                rest = replace(span, begin=sum(segments), end=span.start)
                tiles.append(plan_tiles([rest], self.heads, self.tile, wave=0).tiles)
            end = sum(map(len, tiles))
            chunks.append(
                DenseChunk(
                    first=span.first_row,
                    count=span.count,
                    table=span.table,
                    segments=segments,
                    tiles=range(at, end),
                )
            )
            at = end
        return GroupCut(
            tiles=np.concatenate(tiles),
            paged=range(len(paged.tiles)),
            split=paged.split,
            windowed=range(len(paged.tiles), first),
            dense=tuple(chunks),
        )

    def _has_kernel(self, span: ChunkSpan, window: int | None) -> bool:
        """Whether `windowed_prefill` serves the chunk, or most of it."""
        if window is not None:
            return self.windowed and span.count >= DENSE_TOKENS
        return not span.start and LEAST_TOKENS <= span.count <= self.own_tokens
