"""A step's numbers in device memory, at fixed addresses that CUDA graphs read: decode rows and how
rows are sampled; where the step has prompt chunks, all its rows and the chunks' attention, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.batch import SequenceStep
from engine.cuda.plan import ChunkLayout, StepPlan
from engine.cuda.staging import StagingRing
from engine.kernels.sampling import noise_key
from engine.kernels.triton.prefill_attention import TILE_FIELDS
from engine.kernels.triton.sampling import RowSampling
from protocol.errors import Internal

_DEPTH = 4
#: Vectors begin at multiples of 16 bytes: kernels are compiled for aligned pointers.
_ALIGNMENT = 4


def _decode_views(ints: Any, floats: Any, rows: int) -> SimpleNamespace:
    """The vectors of DecodeInputs in one tensor or array; `floats` is the same memory."""
    part = [slice(rows * i, rows * (i + 1)) for i in range(9)]
    return SimpleNamespace(
        tokens=ints[part[0]],
        feed=ints[part[1]],
        lengths=ints[part[2]],
        top_k=ints[part[3]],
        keys=ints[4 * rows : 6 * rows].reshape(rows, 2),
        temperature=floats[part[6]],
        top_p=floats[part[7]],
        min_p=floats[part[8]],
        indptr=ints[9 * rows : 10 * rows + 1],
        blocks=ints[10 * rows + 1 :],
    )


class DecodeInputs:
    """Inputs of up to `rows` decoding sequences, and the sampling of up to `rows` rows of logits.

    tokens, feed, lengths: int32 `[rows]`; indptr: `[rows + 1]`; blocks: the block tables one after
    another. Where feed[r] >= 0 the row's token is the one sampled last step in row feed[r]. Rows of
    length 0 are padding.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self._rows = rows
        size = 10 * rows + 1 + max_blocks
        self._ring = StagingRing(size, _DEPTH, device)
        self._ints = torch.zeros(size, dtype=torch.int32, device=device)
        views = _decode_views(self._ints, self._ints.view(torch.float32), rows)
        self.tokens, self.feed, self.lengths = views.tokens, views.feed, views.lengths
        self.indptr, self.blocks = views.indptr, views.blocks
        self._views = views

    def upload(self, plan: StepPlan) -> None:
        """Copy a plan's decode rows and sampled rows to the device; later rows become padding."""
        buffer, view, index = self._ring.take()
        to, count = _decode_views(view, view.view(np.float32), self._rows), len(plan.decodes)
        ends = [0, *accumulate(plan.decode_blocks)]
        total = ends[-1]
        if total > len(to.blocks):
            raise Internal(f"{total} blocks in one step, at most {len(to.blocks)}")
        to.tokens[:count] = [step.tokens[0] for step in plan.decodes]
        to.feed[:count] = plan.feeds
        to.lengths[:count] = [step.start + 1 for step in plan.decodes]
        to.lengths[count:] = 0
        to.indptr[: count + 1] = ends
        to.indptr[count + 1 :] = total
        pairs = zip(plan.decodes, plan.decode_blocks, strict=True)
        tables = (step.block_tables[0][:n] for step, n in pairs)
        to.blocks[:total] = np.fromiter(chain.from_iterable(tables), np.int32, total)
        _write_sampling(to, plan.sampled)
        used = 10 * self._rows + 1 + total
        self._ints[:used].copy_(buffer[:used], non_blocking=True)
        self._ring.sent(index)

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
    """The largest step with prompt chunks: rows, kept rows, query tiles, numbers of blocks."""

    rows: int
    kept: int
    tiles: int
    blocks: int


class ChunkInputs:
    """All rows of a step with prompt chunks, decode rows first, and its chunks' attention.

    tokens, feed, positions, slots: int32 `[rows]`; feed as in DecodeInputs; slots are -1 for rows
    whose KV attention writes and for padding. kept: rows of the logits, then those scored. counts:
    see AttentionCut. tiles: int32 `[n, TILE_FIELDS]`; blocks: the chunks' block tables.
    """

    def __init__(self, capacity: ChunkCapacity, device: torch.device) -> None:
        sizes = {"counts": 4}
        sizes |= dict.fromkeys(("tokens", "feed", "positions", "slots"), capacity.rows)
        sizes |= {"kept": capacity.kept, "tiles": capacity.tiles * TILE_FIELDS}
        sizes["blocks"] = capacity.blocks
        ends = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())]
        self._parts = {
            name: slice(end, end + size)
            for (name, size), end in zip(sizes.items(), ends, strict=False)
        }
        self._ring = StagingRing(ends[-1], _DEPTH, device)
        self._ints = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        views = {name: self._ints[part] for name, part in self._parts.items()}
        self.counts, self.tokens, self.feed = views["counts"], views["tokens"], views["feed"]
        self.positions, self.slots, self.kept = views["positions"], views["slots"], views["kept"]
        self.tiles = views["tiles"].view(-1, TILE_FIELDS)
        self.blocks = views["blocks"]
        self.slots.fill_(-1)

    def upload(self, plan: StepPlan, layout: ChunkLayout, block_size: int) -> None:
        """Copy a step's rows to the device, padding behind them up to layout.padded_rows."""
        buffer, view, index = self._ring.take()
        to = {name: view[part] for name, part in self._parts.items()}
        decodes, rows = len(plan.decodes), layout.padded_rows
        tiles = layout.cut.tiles.reshape(-1)
        if layout.num_blocks > len(to["blocks"]) or tiles.size > len(to["tiles"]):
            raise Internal("a step has more blocks or tiles than the engine was made for")
        to["counts"][:] = layout.cut.counts
        to["tokens"][:decodes] = [step.tokens[0] for step in plan.decodes]
        to["feed"][:decodes] = plan.feeds
        to["feed"][decodes:rows] = -1
        to["positions"][:decodes] = 0
        to["slots"][:decodes] = -1
        to["tokens"][layout.rows : rows] = 0
        to["positions"][layout.rows : rows] = 0
        to["slots"][layout.rows : rows] = -1
        for step, first, table in zip(plan.chunks, layout.first_rows, layout.tables, strict=True):
            part = slice(first, first + len(step.tokens))
            to["tokens"][part] = step.tokens
            at = np.arange(step.start, step.start + len(step.tokens), dtype=np.int32)
            to["positions"][part] = at
            ids = np.array(step.block_tables[0][: table.count], np.int32)
            to["blocks"][table.first : table.first + table.count] = ids
            to["slots"][part] = ids[at // block_size] * block_size + at % block_size
        to["kept"][: len(layout.kept)] = layout.kept
        if layout.cut.shape is not None:
            to["kept"][len(layout.kept) : layout.cut.shape.samples] = 0
        to["tiles"][: tiles.size] = tiles
        used = self._parts["blocks"].start + layout.num_blocks
        self._ints[:used].copy_(buffer[:used], non_blocking=True)
        self._ring.sent(index)
