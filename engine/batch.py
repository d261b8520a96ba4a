"""One step of the engine as plain values: its inputs and its result."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protocol.message import Message
from protocol.sampling import SamplingParams, TokenLogprobs


class SequenceStep(Message):
    """One sequence's part of a step: run `tokens` at positions start, start + 1, ...

    block_tables: of each KV group (protocol.kv_layout) the blocks in order, for at least start +
        len(tokens) positions, from the block of the first token that the one at `start` sees. KV of
        the positions before `start` is written.
    sampling: of the token after the last of `tokens`; None when nothing is sampled (a chunk before
        a prompt's last). Its noise is a function of (sampling.seed, start + len(tokens)), the
        absolute position of the sampled token.
    banned: ids that must not be sampled now (stop and end tokens before min_tokens).
    targets: prompt tokens to score: targets[i] follows the i-th of `tokens`; its log-probability is
        returned with those of the num_top likeliest.
    seen, counts: the distinct tokens that penalties apply to, and how often each is in the output
        (0: in the prompt only), as int32 (TokenHistory). Empty without penalties.
    allowed: the ids that a grammar allows now, as bits (engine.kernels.sampling); None allows all.
        `banned` leaves at least one of them.
    previous: when set, `tokens` is one placeholder for the token that row `previous` of the step
        launched just before samples. Only for executors that launch ahead (Executor.depth).
    """

    tokens: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
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
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled token of each sequence, in the order of the batch; None where none is sampled.

    logprobs: of the sampled tokens, by sequence number, where sampling.logprobs asks for them.
    target_logprobs: of the targets. non_finite: sequence numbers whose hidden states or logits are
    infinite or NaN; their tokens mean nothing. device_s: seconds that the step took on its device;
    0 when unknown.
    """

    tokens: tuple[int | None, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    target_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    non_finite: frozenset[int] = frozenset()
    device_s: float = 0.0


class TokenHistory:
    """Token counts of one sequence for its penalties, updated token by token and packed, because
    every step takes them. They follow from prompt and output alone, also after preemption."""

    def __init__(
        self, prompt: Iterable[int], output: Iterable[int], params: SamplingParams
    ) -> None:
        """Presence and frequency penalties apply to output tokens only, repetition to both."""
        counted = prompt if params.repetition_penalty != 1.0 else ()
        self._tokens = array("i", dict.fromkeys(counted))
        self._counts = array("i", bytes(4 * len(self._tokens)))
        self._places = {token: place for place, token in enumerate(self._tokens)}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def seen(self) -> bytes:
        """The distinct tokens in order of appearance, int32."""
        return self._tokens.tobytes()

    def counts(self) -> bytes:
        """Occurrences of each token of `seen` in the output, int32."""
        return self._counts.tobytes()
