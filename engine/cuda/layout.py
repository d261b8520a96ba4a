"""Where a step's numbers lie in device memory: decode rows and sampling at fixed addresses (CUDA
graphs read them there), prompt chunks in a buffer of the step's own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import SequenceStep
from engine.cuda.staging import StagingRing
from engine.kernels.sampling import noise_key
from engine.kernels.triton.attention import PackedChunks
from engine.kernels.triton.sampling import RowSampling
from protocol.errors import Internal

Ints = np.ndarray[Any, np.dtype[np.int32]]
_DEPTH = 4

#: Vectors of a step begin at multiples of 16 bytes: kernels are compiled for aligned pointers, and
#: would be compiled again for every other combination.
ALIGNMENT = 4
_PARTS = 11


#: Chunks of at least this many tokens are worth an attention call of their own.
DENSE_TOKENS = 1024
#: Their lengths are rounded up to this, so that few plans of such a call exist.
DENSE_STEP = 512


def dense_length(count: int) -> int:
    """The length that a dense chunk of `count` tokens is computed at."""
    return -(-count // DENSE_STEP) * DENSE_STEP


def dense_padding(first: int, count: int, total: int) -> int:
    """Rows that a dense call on rows first .. first + count reads past `total`."""
    return max(0, first + dense_length(count) - total)


def _numbers(ints: Any, floats: Any, rows: int) -> SimpleNamespace:
    """What DecodeRows holds, as parts of one tensor or array; `floats` is the same memory."""
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


class DecodeRows:
    """Inputs of up to `rows` decoding sequences, and how up to `rows` rows are sampled.

    tokens, feed, lengths: int32 `[rows]`; indptr: `[rows + 1]`; blocks: the block tables one after
    another. Where feed[r] >= 0 the row's token is the one sampled last step in row feed[r].
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self._rows = rows
        size = 10 * rows + 1 + max_blocks
        self._ring = StagingRing(size, _DEPTH, device)
        self._device_ints = torch.zeros(size, dtype=torch.int32, device=device)
        at = _numbers(self._device_ints, self._device_ints.view(torch.float32), rows)
        self.tokens, self.feed, self.lengths = at.tokens, at.feed, at.lengths
        self.indptr, self.blocks = at.indptr, at.blocks
        self._at = at

    def upload(
        self,
        steps: list[SequenceStep],
        feeds: list[int],
        block_counts: list[int],
        sampled: list[SequenceStep],
    ) -> None:
        """Put decoding sequences and sampled rows on the device; later rows become padding."""
        buffer, view, index = self._ring.take()
        to, count = _numbers(view, view.view(np.float32), self._rows), len(steps)
        ends = [0, *accumulate(block_counts)]
        total = ends[-1]
        if total > len(to.blocks):
            raise Internal(f"{total} blocks in one step, at most {len(to.blocks)}")
        to.tokens[:count] = [step.tokens[0] for step in steps]
        to.feed[:count] = feeds
        to.lengths[:count] = [step.start + 1 for step in steps]
        to.lengths[count:] = 0
        to.indptr[: count + 1] = ends
        to.indptr[count + 1 :] = total
        tables = (step.block_ids[:n] for step, n in zip(steps, block_counts, strict=True))
        to.blocks[:total] = np.fromiter(chain.from_iterable(tables), np.int32, total)
        _write_sampling(to, sampled)
        used = 10 * self._rows + 1 + total
        self._device_ints[:used].copy_(buffer[:used], non_blocking=True)
        self._ring.sent(index)

    def sampling(self, count: int, filtered: bool) -> RowSampling:
        """How the first `count` sampled rows are sampled."""
        at = self._at
        return RowSampling(
            temperature=at.temperature[:count],
            top_k=at.top_k[:count],
            top_p=at.top_p[:count],
            min_p=at.min_p[:count],
            keys=at.keys[:count],
            filtered=filtered,
        )


def _write_sampling(to: SimpleNamespace, sampled: list[SequenceStep]) -> None:
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
class ChunkRows:
    """Prompt chunks packed one after another, on the device.

    tokens, feed (all -1), positions, slots (-1: none): int32 `[tokens]`; sample_rows, score_rows:
    int64, rows among the chunks whose logits and whose hidden states are wanted. dense: (first row,
    rows) of the chunks that are attended to one by one, which read `padding` rows past the last;
    packed: all others, or None.
    """

    tokens: Tensor
    feed: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    score_rows: Tensor
    packed: PackedChunks | None
    dense: tuple[tuple[int, int], ...]
    padding: int


class ChunkUploader:
    """Packs prompt chunks in pinned memory and copies them over in one piece.

    dense: whether chunks from position 0 of at least DENSE_TOKENS are attended to one by one.
    """

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        device: torch.device,
        *,
        dense: bool,
    ) -> None:
        size = 5 * max_tokens + 6 * max_sequences + 2 + max_blocks + _PARTS * ALIGNMENT
        self._ring = StagingRing(size, _DEPTH, device)
        self._device = device
        self._dense = dense

    def upload(
        self, steps: list[SequenceStep], block_counts: list[int], block_size: int, rows: int = 0
    ) -> ChunkRows:
        """Put the chunks on the device, with rows without a place behind them to make `rows`."""
        counts = [len(step.tokens) for step in steps]
        firsts = [0, *accumulate(counts)]
        total = firsts[-1]
        scored = [firsts[i] + j for i, s in enumerate(steps) for j in range(len(s.targets))]
        wanted = [firsts[i + 1] - 1 for i, s in enumerate(steps) if s.sampling is not None]
        dense = [i for i, step in enumerate(steps) if self._is_dense(step)]
        rest = [i for i in range(len(steps)) if i not in dense]
        tables = [
            np.array(step.block_ids[:n], np.int32)
            for step, n in zip(steps, block_counts, strict=True)
        ]
        positions, slots = _places(steps, tables, block_size)
        more = max(0, rows - total)
        sent = self._send(
            tokens=np.fromiter(chain(*(s.tokens for s in steps), repeat(0, more)), np.int32),
            feed=np.full(total + more, -1, np.int32),
            positions=np.pad(positions, (0, more)),
            slots=np.pad(slots, (0, more), constant_values=-1),
            wanted=np.array(wanted, np.int32),
            first_rows=np.array([firsts[i] for i in rest], np.int32),
            starts=np.array([steps[i].start for i in rest], np.int32),
            counts=np.array([counts[i] for i in rest], np.int32),
            indptr=np.array([0, *accumulate(block_counts[i] for i in rest)], np.int32),
            blocks=np.concatenate([np.zeros(0, np.int32), *(tables[i] for i in rest)]),
            scored=np.array(scored, np.int32),
        )
        packed = None
        if rest:
            packed = PackedChunks(
                first_rows=sent["first_rows"],
                starts=sent["starts"],
                counts=sent["counts"],
                indptr=sent["indptr"],
                blocks=sent["blocks"],
                max_count=max(counts[i] for i in rest),
            )
        return ChunkRows(
            tokens=sent["tokens"],
            feed=sent["feed"],
            positions=sent["positions"],
            slots=sent["slots"],
            sample_rows=sent["wanted"].long(),
            score_rows=sent["scored"].long(),
            packed=packed,
            dense=tuple((firsts[i], counts[i]) for i in dense),
            padding=max((dense_padding(firsts[i], counts[i], total) for i in dense), default=0),
        )

    def _is_dense(self, step: SequenceStep) -> bool:
        return self._dense and step.start == 0 and len(step.tokens) >= DENSE_TOKENS

    def _send(self, **parts: Ints) -> dict[str, Tensor]:
        buffer, view, index = self._ring.take()
        begins = [0, *accumulate(-(-len(part) // ALIGNMENT) * ALIGNMENT for part in parts.values())]
        total = begins.pop()
        if total > view.shape[0]:
            raise Internal(f"a step of {total} numbers, at most {view.shape[0]}")
        for part, begin in zip(parts.values(), begins, strict=True):
            view[begin : begin + len(part)] = part
        out = torch.empty(total, dtype=torch.int32, device=self._device)
        out.copy_(buffer[:total], non_blocking=True)
        self._ring.sent(index)
        found = zip(parts.items(), begins, strict=True)
        return {name: out[begin : begin + len(part)] for (name, part), begin in found}


def _places(steps: list[SequenceStep], tables: list[Ints], block_size: int) -> tuple[Ints, Ints]:
    """(positions, slots) of every row."""
    positions = [
        np.arange(step.start, step.start + len(step.tokens), dtype=np.int32) for step in steps
    ]
    slots = [
        table[at // block_size] * block_size + at % block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    return np.concatenate(positions), np.concatenate(slots)
