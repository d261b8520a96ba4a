"""Splits a batch into what the device runs: decode rows first, prompt chunks after them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import SequenceStep, StepBatch
from engine.cpu.inputs import StepLimits, check_step
from engine.kernels.logprobs import LogprobRows
from engine.kernels.masks import TokenMasks
from engine.kernels.penalties import Penalties
from protocol.errors import Internal

#: Contexts longer than this get more splits of decode attention.
LONG_CONTEXT = 4096


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
    runs, or -1; *_blocks: how many blocks each sequence needs. sampled: the sequences of the
    logits' rows (every decode row, then the chunks that sample); results[i]: the logits row of
    sequence i of the batch, or None. banned: (logits row, token id) pairs. masks: logits rows with
    few allowed tokens, if any. penalties: other changes of the logits, if any. logprobs,
    scored: sampled tokens and targets whose log-probabilities are wanted, if any.
    """

    decodes: list[SequenceStep]
    feeds: list[int]
    decode_blocks: list[int]
    chunks: list[SequenceStep]
    chunk_blocks: list[int]
    sampled: list[SequenceStep]
    results: list[int | None]
    banned: list[tuple[int, int]]
    penalties: Penalties | None
    masks: TokenMasks | None
    logprobs: LogprobRows | None
    scored: LogprobRows | None
    filtered: bool
    long_context: bool


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
    decode_blocks = [check_step(step, limits) for step in decodes]
    chunk_blocks = [check_step(step, limits) for step in chunks]
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
        chunk_blocks=chunk_blocks,
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
