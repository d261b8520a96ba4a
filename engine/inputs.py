"""Lays the sequences of a step out in rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch import SequenceStep, StepBatch
from engine.kernels.base import StepInputs
from engine.kernels.logprobs import LogprobRows
from engine.kernels.masks import mask_bytes
from engine.kernels.penalties import Penalties
from engine.kernels.sampling import SamplingInputs
from protocol.errors import Internal


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch in rows. `sampled[i]` is the batch index of the i-th sampled row.

    logprobs, scored: sampled tokens and targets whose log-probabilities are wanted, if any.
    """

    inputs: StepInputs
    sampling: SamplingInputs
    sampled: tuple[int, ...]
    logprobs: LogprobRows | None
    scored: LogprobRows | None


def prepare_step(
    batch: StepBatch, *, block_size: int, num_blocks: int, vocab_size: int, max_model_len: int
) -> PreparedStep:
    """Decodes first, longest context first, then longer chunks; results map back by `sampled`.

    Raises Internal when an id, a block or a position is out of range: schedulers never plan that,
    and nothing may be read or written outside the pool.
    """
    order = sorted(range(len(batch.sequences)), key=lambda i: _rank(batch.sequences[i]))
    steps = [batch.sequences[i] for i in order]
    for step in steps:
        _check(step, block_size, max_model_len)
        check_mask(step, vocab_size)
    token_ids = torch.tensor([token for step in steps for token in step.tokens])
    positions = torch.tensor(
        [position for step in steps for position in range(step.start, _end(step))]
    )
    slots = torch.tensor([slot for step in steps for slot in _slots(step, block_size)])
    _check_range("token id", token_ids, vocab_size)
    block_ids = tuple(step.block_ids[: -(-_end(step) // block_size)] for step in steps)
    _check_blocks(block_ids, num_blocks)
    rows, sampled = _sample_rows(order, steps)
    inputs = StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        queries=tuple(len(step.tokens) for step in steps),
        contexts=tuple(_end(step) for step in steps),
        block_ids=block_ids,
        num_decodes=sum(len(step.tokens) == 1 for step in steps),
        sample_rows=torch.tensor(rows, dtype=torch.int64),
        score_rows=torch.tensor(_score_rows(steps), dtype=torch.int64),
    )
    chosen = [batch.sequences[i] for i in sampled]
    return PreparedStep(
        inputs=inputs,
        sampling=_sampling(chosen),
        sampled=tuple(sampled),
        logprobs=LogprobRows.of_sampled(list(zip(sampled, chosen, strict=True))),
        scored=LogprobRows.of_targets(list(zip(order, steps, strict=True))),
    )


def _end(step: SequenceStep) -> int:
    return step.start + len(step.tokens)


def _rank(step: SequenceStep) -> tuple[bool, int]:
    return len(step.tokens) > 1, -_end(step)


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


def _sampling(steps: list[SequenceStep]) -> SamplingInputs:
    params = [step.sampling for step in steps if step.sampling is not None]
    return SamplingInputs.build(
        params,
        [_end(step) for step in steps],
        [step.banned for step in steps],
        Penalties.build(steps),
        [step.allowed for step in steps],
    )


def _check(step: SequenceStep, block_size: int, max_model_len: int) -> None:
    if step.previous is not None:
        raise Internal("this executor runs steps one by one: tokens must be known")
    if not step.tokens or step.start < 0:
        raise Internal("a step without tokens or at a negative position")
    if len(step.targets) > len(step.tokens):
        raise Internal("more targets than tokens")
    if _end(step) > max_model_len:
        raise Internal(f"position {_end(step)} is past max_model_len {max_model_len}")
    if len(step.block_ids) * block_size < _end(step):
        raise Internal(f"{len(step.block_ids)} blocks do not hold {_end(step)} tokens")


def check_mask(step: SequenceStep, vocab_size: int) -> None:
    """Raise Internal when a step's mask is not one of this vocabulary, or allows nothing."""
    if step.allowed is None:
        return
    if len(step.allowed) != mask_bytes(vocab_size):
        raise Internal(f"a mask of {len(step.allowed)} bytes for {vocab_size} ids")
    if not any(step.allowed):
        raise Internal("a mask that allows no token")


def _check_range(what: str, values: Tensor, limit: int) -> None:
    low, high = values.aminmax()
    if int(low) < 0 or int(high) >= limit:
        raise Internal(f"{what} outside 0 .. {limit - 1}: {int(low)} .. {int(high)}")


def _check_blocks(tables: tuple[tuple[int, ...], ...], num_blocks: int) -> None:
    low, high = min(map(min, tables)), max(map(max, tables))
    if low < 0 or high >= num_blocks:
        raise Internal(f"block outside 0 .. {num_blocks - 1}: {low} .. {high}")
