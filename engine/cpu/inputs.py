"""Lays the sequences of a step out in rows, and checks them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from engine.batch import SequenceStep, StepBatch
from engine.kernels.base import StepInputs
from engine.kernels.logprobs import LogprobRows
from engine.kernels.sampling import Penalties, SamplingInputs, mask_bytes
from protocol.errors import Internal
from protocol.kv_layout import ONE_GROUP, KVGroup

_MAX_CHECKED = 1024  # tables that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch in rows. `groups`: for each KV group; they differ in slots, contexts and block_ids.
    `inputs` is that of the first.

    `order[i]` is the batch index of the i-th sequence in rows, `sampled[i]`
    that of the i-th sampled row.

    logprobs, scored: sampled tokens and targets whose log-probabilities are wanted, if any.
    """

    groups: tuple[StepInputs, ...]
    sampling: SamplingInputs
    order: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: LogprobRows | None
    scored: LogprobRows | None

    @property
    def inputs(self) -> StepInputs:
        return self.groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of what a step may refer to; schedulers plan within them. `checked`: block tables that
    are within them, by identity: most steps come with those of the step before."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    groups: tuple[KVGroup, ...] = ONE_GROUP
    checked: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)


def prepare_step(batch: StepBatch, limits: StepLimits) -> PreparedStep:
    """Decodes first, longest context first, then longer chunks.

    Raises Internal when an id, a block or a position is out of range: schedulers never plan that,
    and nothing may be read or written outside the pool.
    """
    given = batch.sequences
    order = sorted(range(len(given)), key=lambda i: (len(given[i].tokens) > 1, -_end(given[i])))
    steps = [given[i] for i in order]
    if any(step.previous is not None for step in steps):
        raise Internal("this executor runs steps one by one: tokens must be known")
    for step in steps:
        check_step(step, limits)
    rows, sampled = _sample_rows(order, steps)
    inputs = StepInputs(
        token_ids=torch.tensor([token for step in steps for token in step.tokens]),
        positions=torch.tensor(
            [position for step in steps for position in range(step.start, _end(step))]
        ),
        queries=tuple(len(step.tokens) for step in steps),
        num_decodes=sum(len(step.tokens) == 1 for step in steps),
        sample_rows=torch.tensor(rows, dtype=torch.int64),
        score_rows=torch.tensor(_score_rows(steps), dtype=torch.int64),
        **_tables(steps, 0, limits),
    )
    others = (_tables(steps, group, limits) for group in range(1, len(limits.groups)))
    chosen = [given[i] for i in sampled]
    return PreparedStep(
        groups=(inputs, *(replace(inputs, **tables) for tables in others)),
        sampling=SamplingInputs.build(
            [step.sampling for step in chosen if step.sampling is not None],
            [_end(step) for step in chosen],
            [step.banned for step in chosen],
            Penalties.build(chosen),
            [step.allowed for step in chosen],
        ),
        order=tuple(order),
        sampled=tuple(sampled),
        logprobs=LogprobRows.of_sampled(list(zip(sampled, chosen, strict=True))),
        scored=LogprobRows.of_targets(list(zip(order, steps, strict=True))),
    )


def _end(step: SequenceStep) -> int:
    return step.start + len(step.tokens)


def _tables(steps: list[SequenceStep], index: int, limits: StepLimits) -> dict[str, Any]:
    """The slots, contexts and block_ids of a KV group. Of a group with a window they count from the
    first block that the step sees."""
    group, size = limits.groups[index], limits.block_size
    slots: list[int] = []
    contexts, block_ids = [], []
    for step in steps:
        blocks, end = step.block_tables[index], _end(step)
        first = group.first_token(step.start) // size * size
        slots += [
            blocks[p // size] * size + p % size for p in range(step.start - first, end - first)
        ]
        contexts.append(end - first)
        block_ids.append(blocks[: -(-(end - first) // size)])
    return {
        "slots": torch.tensor(slots),
        "contexts": tuple(contexts),
        "block_ids": tuple(block_ids),
    }


def _sample_rows(order: list[int], steps: list[SequenceStep]) -> tuple[list[int], list[int]]:
    rows, sampled, end = [], [], 0
    for index, step in zip(order, steps, strict=True):
        end += len(step.tokens)
        if step.sampling is not None:
            rows.append(end - 1)
            sampled.append(index)
    return rows, sampled


def _score_rows(steps: list[SequenceStep]) -> list[int]:
    starts = accumulate((len(step.tokens) for step in steps), initial=0)
    return [
        start + i
        for start, step in zip(starts, steps, strict=False)
        for i in range(len(step.targets))
    ]


def check_step(
    step: SequenceStep, limits: StepLimits, ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
) -> int:
    """The number of blocks that hold its tokens up to the last; raises Internal when something is
    out of range. ids: its tokens, where an array of them exists."""
    end = _end(step)
    if not step.tokens or step.start < 0:
        raise Internal("a step without tokens or at a negative position")
    if len(step.targets) > len(step.tokens):
        raise Internal("more targets than tokens")
    if end > limits.max_model_len:
        raise Internal(f"position {end} is past max_model_len {limits.max_model_len}")
    if step.previous is not None and len(step.tokens) != 1:
        raise Internal("only a single token can come from the step before")
    tokens = step.tokens
    low, high = (min(tokens), max(tokens)) if ids is None else (ids.min(), ids.max())
    if low < 0 or high >= limits.vocab_size:
        raise Internal(f"token id outside 0 .. {limits.vocab_size - 1}")
    if step.allowed is not None:
        _check_mask(step.allowed, limits.vocab_size)
    for group, table in zip(limits.groups, step.block_tables, strict=True):
        first = group.first_token(step.start) // limits.block_size
        if (first + len(table)) * limits.block_size < end:
            raise Internal(f"{first} + {len(table)} blocks do not hold {end} tokens")
        if limits.checked.get(id(table)) is not table:
            _check_table(table, limits)
    return -(-end // limits.block_size)


def _check_table(table: tuple[int, ...], limits: StepLimits) -> None:
    if min(table) < 0 or max(table) >= limits.num_blocks:
        raise Internal(f"block outside 0 .. {limits.num_blocks - 1}")
    if len(limits.checked) >= _MAX_CHECKED:
        limits.checked.clear()
    limits.checked[id(table)] = table


def _check_mask(allowed: bytes, vocab_size: int) -> None:
    if len(allowed) != mask_bytes(vocab_size):
        raise Internal(f"a mask of {len(allowed)} bytes for {vocab_size} ids")
    if not any(allowed):
        raise Internal("a mask that allows no token")
