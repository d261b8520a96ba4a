"""A step's numbers in device memory, at fixed addresses that CUDA graphs read: decode rows and how
rows are sampled; where the step has prompt chunks, all its rows and the chunks' attention, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.batch import SequenceStep
from engine.cuda.plan import ChunkLayout, StepPlan
from engine.cuda.staging import StagingRing, copied_size, copy
from engine.kernels.sampling import noise_key
from engine.kernels.triton.prefill_attention import TILE_FIELDS
from engine.kernels.triton.sampling import RowSampling
from engine.kernels.triton.splits import Ints
from protocol.errors import Internal
from protocol.kv_layout import ONE_GROUP, KVGroup

_DEPTH = 4
#: Vectors begin at multiples of 16 bytes: kernels are compiled for aligned pointers.
_ALIGNMENT = 4


def _decode_views(
    ints: Any, floats: Any, rows: int, groups: int, max_splits: int
) -> SimpleNamespace:
    """The vectors of DecodeInputs in one tensor or array; `floats` is the same memory."""
    part = [slice(rows * i, rows * (i + 1)) for i in range(9)]
    stride, first = _aligned(rows), _aligned(9 * rows)
    splits, table = first + groups * stride, _aligned(1 + max_splits)
    blocks = splits + groups * table
    return SimpleNamespace(
        tokens=ints[part[0]],
        feed=ints[part[1]],
        lengths=ints[part[2]],
        top_k=ints[part[3]],
        keys=ints[4 * rows : 6 * rows].reshape(rows, 2),
        temperature=floats[part[6]],
        top_p=floats[part[7]],
        min_p=floats[part[8]],
        starts=ints[first:splits].reshape(groups, stride)[:, :rows],
        splits=ints[splits:blocks].reshape(groups, table),
        blocks=ints[blocks:],
        header=blocks,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Arrays:
    """Block tables as arrays. A sequence's table is the same in most steps: the array of the step
    before is used again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[tuple[int, ...], Ints]] = {}

    def of(self, group: int, row: int, ids: tuple[int, ...]) -> Ints:
        """The table that a group has in a row."""
        known = self._known.get((group, row))
        if known is None or (known[0] is not ids and known[0] != ids):
            known = self._known[group, row] = ids, np.array(ids, np.int32)
        return known[1]


class DecodeInputs:
    """Inputs of up to `rows` decoding sequences, and the sampling of up to `rows` rows of logits.

    tokens, feed, lengths: int32 `[rows]`; blocks: the block tables of all KV groups, one after
    another; starts `[groups, rows]`: where block 0 of a sequence would be among them, which has no
    block before the first that its window sees; splits `[groups, 1 + max_splits or more]`: see
    `plan_splits`, none where contexts are not cut one by one. Where feed[r] >= 0 the row's token is
    the one sampled last step in row feed[r]. Rows of length 0 are padding.
    """

    def __init__(
        self,
        rows: int,
        max_blocks: int,
        device: torch.device,
        *,
        block_size: int,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        max_splits: int = 0,
    ) -> None:
        """max_blocks: of all groups' tables together; max_splits: of each group."""
        self._rows = rows
        self._max_blocks = max_blocks
        self._groups = groups
        self._block_size = block_size
        self._arrays = _Arrays()
        self._max_splits = max_splits
        of_group = _aligned(rows) + _aligned(1 + max_splits)
        size = copied_size(_aligned(9 * rows) + len(groups) * of_group + max_blocks)
        self._ring = StagingRing(size, _DEPTH, device)
        self._ints = torch.zeros(size, dtype=torch.int32, device=device)
        floats = self._ints.view(torch.float32)
        views = _decode_views(self._ints, floats, rows, len(groups), max_splits)
        self.tokens, self.feed, self.lengths = views.tokens, views.feed, views.lengths
        self.starts, self.blocks, self.splits = views.starts, views.blocks, views.splits
        self._views = views

    def upload(self, plan: StepPlan) -> None:
        """Copy a plan's decode rows and sampled rows to the device; later rows become padding."""
        buffer, view, index = self._ring.take()
        groups = len(self._groups)
        to = _decode_views(view, view.view(np.float32), self._rows, groups, self._max_splits)
        count = len(plan.decodes)
        to.tokens[:count] = [step.tokens[0] for step in plan.decodes]
        to.feed[:count] = plan.feeds
        to.lengths[:count] = [step.start + 1 for step in plan.decodes]
        to.lengths[count:] = 0
        to.starts[:, count:] = 0
        to.splits[:, 0] = 0
        for table, splits in zip(to.splits, plan.splits, strict=False):
            table[: len(splits)] = splits
        total = self._write_tables(to, plan)
        _write_sampling(to, plan.sampled)
        copy(buffer, self._ints, to.header + total)
        self._ring.sent(index)

    def _write_tables(self, to: SimpleNamespace, plan: StepPlan) -> int:
        """Write all tables one after another; how many blocks they have."""
        tables: list[Ints] = []
        end = 0
        for number, group in enumerate(self._groups):
            starts = []
            for row, (step, blocks) in enumerate(
                zip(plan.decodes, plan.decode_blocks, strict=True)
            ):
                first = group.first_token(step.start) // self._block_size
                ids = self._arrays.of(number, row, step.block_tables[number])
                tables.append(ids[: blocks - first])
                starts.append(end - first)
                end += blocks - first
            to.starts[number, : len(starts)] = starts
        if end > self._max_blocks:
            raise Internal(f"{end} blocks in one step, at most {self._max_blocks}")
        if tables:
            np.concatenate(tables, out=to.blocks[:end])
        return end

    def sampling(self, count: int, filtered: bool) -> RowSampling:
        """The sampling of the first `count` rows of logits."""
        views = self._views
        return RowSampling(
            temperature=views.temperature[:count],
            top_k=views.top_k[:count],
            top_p=views.top_p[:count],
            min_p=views.min_p[:count],
            keys=views.keys[:count],
            filtered=filtered,
        )


def _write_sampling(to: SimpleNamespace, sampled: Sequence[SequenceStep]) -> None:
    to.temperature[: len(sampled)] = 0.0
    for row, step in enumerate(sampled):
        params = step.sampling
        if params is None or params.greedy:
            continue
        to.top_k[row] = params.top_k
        to.keys[row] = noise_key(params.seed, step.start + len(step.tokens))
        to.temperature[row] = params.temperature
        to.top_p[row] = params.top_p
        to.min_p[row] = params.min_p


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCapacity:
    """The largest step with prompt chunks: rows, kept rows, query tiles of a KV group, numbers of
    blocks of all groups, groups."""

    rows: int
    kept: int
    tiles: int
    blocks: int
    groups: int = 1


class ChunkInputs:
    """All rows of a step with prompt chunks, decode rows first, and its chunks' attention.

    tokens, feed, positions: int32 `[rows]`; feed as in DecodeInputs. kept: rows of the logits, then
    those scored. Of each KV group: slots `[rows]`, -1 for rows whose KV attention writes and for
    padding; counts: of tiles, `[1]`; tiles: int32 `[n, TILE_FIELDS]`. blocks: all block tables.
    damaged: int32 `[rows or more]`, an output: rows that are not finite.
    """

    def __init__(self, capacity: ChunkCapacity, device: torch.device) -> None:
        groups = range(capacity.groups)
        sizes: dict[str, int] = {f"counts{g}": 1 for g in groups}
        sizes |= dict.fromkeys(("tokens", "feed", "positions"), capacity.rows)
        sizes |= {f"slots{g}": capacity.rows for g in groups}
        sizes["kept"] = capacity.kept
        sizes |= {f"tiles{g}": capacity.tiles * TILE_FIELDS for g in groups}
        sizes["blocks"] = capacity.blocks
        ends = [0, *accumulate(map(_aligned, sizes.values()))]
        self._parts = {
            name: slice(end, end + size)
            for (name, size), end in zip(sizes.items(), ends, strict=False)
        }
        size = copied_size(ends[-1])
        self._ring = StagingRing(size, _DEPTH, device)
        self._ints = torch.zeros(size, dtype=torch.int32, device=device)
        views = {name: self._ints[part] for name, part in self._parts.items()}
        self.tokens, self.feed = views["tokens"], views["feed"]
        self.positions, self.kept = views["positions"], views["kept"]
        self.counts = [views[f"counts{g}"] for g in groups]
        self.slots = [views[f"slots{g}"].fill_(-1) for g in groups]
        self.tiles = [views[f"tiles{g}"].view(-1, TILE_FIELDS) for g in groups]
        self.blocks = views["blocks"]
        self.damaged = self.tokens.new_zeros(copied_size(capacity.rows))

    def upload(self, plan: StepPlan, layout: ChunkLayout, block_size: int) -> None:
        """Copy a step's rows to the device, padding behind them up to layout.padded_rows."""
        buffer, view, index = self._ring.take()
        to = {name: view[part] for name, part in self._parts.items()}
        if layout.num_blocks > len(to["blocks"]):
            raise Internal("a step has more blocks than the engine was made for")
        decodes, rows = len(plan.decodes), layout.padded_rows
        to["tokens"][:decodes] = [step.tokens[0] for step in plan.decodes]
        to["feed"][:decodes] = plan.feeds
        to["feed"][decodes:rows] = -1
        to["positions"][:decodes] = 0
        to["tokens"][layout.rows : rows] = 0
        to["positions"][layout.rows : rows] = 0
        chunks = zip(plan.chunks, plan.chunk_ids, layout.first_rows, strict=True)
        for step, ids, first in chunks:
            part = slice(first, first + len(step.tokens))
            to["tokens"][part] = ids
            to["positions"][part] = np.arange(step.start, step.start + len(step.tokens))
        to["kept"][: len(layout.kept)] = layout.kept
        if layout.shape is not None:
            to["kept"][len(layout.kept) : layout.shape.samples] = 0
        for group in range(len(self.slots)):
            self._write_group(to, plan, layout, group, block_size)
        copy(buffer, self._ints, self._parts["blocks"].start + layout.num_blocks)
        self._ring.sent(index)

    def _write_group(
        self,
        to: dict[str, Ints],
        plan: StepPlan,
        layout: ChunkLayout,
        group: int,
        block_size: int,
    ) -> None:
        """The slots, tables and tiles of one KV group."""
        cut = layout.cuts[group]
        slots, tiles = to[f"slots{group}"], cut.tiles.reshape(-1)
        if tiles.size > len(to[f"tiles{group}"]):
            raise Internal("a step has more tiles than the engine was made for")
        to[f"counts{group}"][0] = len(cut.tiles)
        to[f"tiles{group}"][: tiles.size] = tiles
        slots[: len(plan.decodes)] = -1
        slots[layout.rows : layout.padded_rows] = -1
        places = zip(plan.chunks, layout.first_rows, layout.tables[group], strict=True)
        for step, first, table in places:
            ids = np.array(step.block_tables[group][: table.count], np.int32)
            to["blocks"][table.first : table.first + table.count] = ids
            block, offset = divmod(step.start, block_size)
            cells = ids[block - table.number :, None] * block_size + np.arange(block_size)
            count = len(step.tokens)
            slots[first : first + count] = cells.reshape(-1)[offset : offset + count]
