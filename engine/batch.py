"""One step of the engine as plain values: its inputs and its result."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protocol.logprobs import TokenLogprobs
from protocol.message import Message
from protocol.sampling import SamplingParams


class SequenceStep(Message):
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
    banned: tuple[int, ...] = ()
    seen: bytes = b""
    counts: bytes = b""
    allowed: bytes | None = None
    targets: tuple[int, ...] = ()
    num_top: int = 0
    previous: int | None = None
    sampling: SamplingParams | None


class StepBatch(Message):
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


class TokenHistory:
    """Counts of one sequence's tokens, kept up token by token, and packed: every step takes them,
    of prompts with thousands of different tokens, too.

    They follow from prompt and output alone, so a preempted or resumed sequence has the same.
    """

    def __init__(
        self, prompt: Iterable[int], output: Iterable[int], params: SamplingParams
    ) -> None:
        """Presence and frequency penalties look at the output only, repetition at both."""
        looked_at = prompt if params.repetition_penalty != 1.0 else ()
        self._tokens = array("i", dict.fromkeys(looked_at))
        self._counts = array("i", bytes(4 * len(self._tokens)))
        self._places = {token: place for place, token in enumerate(self._tokens)}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def seen(self) -> bytes:
        """The different tokens, in order of appearance: int32."""
        return self._tokens.tobytes()

    def counts(self) -> bytes:
        """How often each token of `seen` is in the output: int32."""
        return self._counts.tobytes()
