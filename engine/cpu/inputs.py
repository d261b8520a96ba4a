"""Lays the sequences of a step out in rows, and checks them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.batch import SequenceStep, StepBatch
from engine.kernels.base import StepInputs
from engine.kernels.logprobs import LogprobRows
from engine.kernels.sampling import Penalties, SamplingInputs, mask_bytes
from protocol.errors import Internal


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch in rows. `order[i]` is the batch index of the i-th sequence in rows, `sampled[i]`
    that of the i-th sampled row.

    logprobs, scored: sampled tokens and targets whose log-probabilities are wanted, if any.
    """

    inputs: StepInputs
    sampling: SamplingInputs
    order: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: LogprobRows | None
    scored: LogprobRows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of what a step may refer to; schedulers plan within them."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int


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
    num_blocks = [check_step(step, limits) for step in steps]
    rows, sampled = _sample_rows(order, steps)
    inputs = StepInputs(
        token_ids=torch.tensor([token for step in steps for token in step.tokens]),
        positions=torch.tensor(
            [position for step in steps for position in range(step.start, _end(step))]
        ),
        slots=torch.tensor([slot for step in steps for slot in _slots(step, limits.block_size)]),
        queries=tuple(len(step.tokens) for step in steps),
        contexts=tuple(_end(step) for step in steps),
        block_ids=tuple(s.block_ids[:n] for s, n in zip(steps, num_blocks, strict=True)),
        num_decodes=sum(len(step.tokens) == 1 for step in steps),
        sample_rows=torch.tensor(rows, dtype=torch.int64),
        score_rows=torch.tensor(_score_rows(steps), dtype=torch.int64),
    )
    chosen = [given[i] for i in sampled]
    return PreparedStep(
        inputs=inputs,
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


def _slots(step: SequenceStep, block_size: int) -> list[int]:
    blocks = step.block_ids
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(step.start, _end(step))
    ]


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


def check_step(step: SequenceStep, limits: StepLimits) -> int:
    """The number of blocks that the step needs; raises Internal when something is out of range."""
    end = _end(step)
    if not step.tokens or step.start < 0:
        raise Internal("a step without tokens or at a negative position")
    if len(step.targets) > len(step.tokens):
        raise Internal("more targets than tokens")
    if end > limits.max_model_len:
        raise Internal(f"position {end} is past max_model_len {limits.max_model_len}")
    if step.previous is not None and len(step.tokens) != 1:
        raise Internal("only a single token can come from the step before")
    if min(step.tokens) < 0 or max(step.tokens) >= limits.vocab_size:
        raise Internal(f"token id outside 0 .. {limits.vocab_size - 1}")
    if step.allowed is not None:
        _check_mask(step.allowed, limits.vocab_size)
    count = -(-end // limits.block_size)
    if len(step.block_ids) < count:
        raise Internal(f"{len(step.block_ids)} blocks do not hold {end} tokens")
    if min(step.block_ids) < 0 or max(step.block_ids) >= limits.num_blocks:
        raise Internal(f"block outside 0 .. {limits.num_blocks - 1}")
    return count


def _check_mask(allowed: bytes, vocab_size: int) -> None:
    if len(allowed) != mask_bytes(vocab_size):
        raise Internal(f"a mask of {len(allowed)} bytes for {vocab_size} ids")
    if not any(allowed):
        raise Internal("a mask that allows no token")
