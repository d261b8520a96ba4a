"""One step of the engine as plain values: what to run, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.logprobs import TokenLogprobs
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """What one sequence does in a step: run `tokens` at positions start, start + 1, ...

    block_ids: the sequence's blocks in order; they cover at least start + len(tokens) positions,
        and the KV of positions 0 .. start - 1 is already there.
    sampling: how to choose the token that follows the last one of `tokens`; None when nothing is
        sampled (a prompt's chunk before its last). The sampled token's noise is a function of
        (sampling.seed, start + len(tokens)): the absolute position that the token will have.
    banned: token ids that must not be sampled now (stop and end tokens before min_tokens).
    targets: prompt tokens to be scored: targets[i] follows the i-th of `tokens`, and its
        log-probability is wanted, with the num_top likeliest.
    seen, counts: the different tokens that the penalties look at, and how often each of them is in
        the output (0: in the prompt only), as int32 (engine.history). Empty without penalties.
    allowed: the only ids that may be sampled now (a grammar), as bits: engine.kernels.masks; None
        when all may. `banned` leaves at least one of them.
    previous: when set, `tokens` is one placeholder, and the token that runs is the one that
        sequence number `previous` of the step launched just before this one samples. Only for
        executors whose `launch` returns before the step is over.
    """

    tokens: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams | None
    banned: tuple[int, ...] = ()
    seen: bytes = b""
    counts: bytes = b""
    allowed: bytes | None = None
    targets: tuple[int, ...] = ()
    num_top: int = 0
    previous: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """All sequences of one step. Prompt chunks and single decode tokens mix freely."""

    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that run through the model in this step."""
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled token of each sequence, in the order of the batch; None where none was asked for.

    logprobs: of the sampled tokens, by sequence number, where sampling.logprobs asks for them;
    target_logprobs: of the targets.
    """

    tokens: tuple[int | None, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    target_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
