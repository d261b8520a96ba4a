"""One request as a scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch import SequenceStep
from engine.history import TokenHistory
from protocol.ids import RequestKey
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.states import FinishReason
from protocol.timeline import Phase, Span


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Tokens, blocks and marks of one request. Owned and changed by exactly one scheduler.

    `tokens` are prompt + output so far; positions 0 .. num_computed - 1 have their KV in
    `block_ids`. `num_known_output` output tokens came with the request (an earlier attempt made
    them). `history` is there when the sampling has penalties.
    """

    submit: Submit
    arrival: float
    tokens: list[int]
    history: TokenHistory | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_chunks: int = 0
    marks: dict[Phase, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, submit: Submit, now: float) -> Sequence:
        """The sequence of a request that has just arrived."""
        prompt, output, sampling = submit.prompt_ids, submit.output_ids, submit.sampling
        return cls(
            submit=submit,
            arrival=now,
            tokens=[*prompt, *output],
            history=TokenHistory(prompt, output, sampling) if sampling.penalised else None,
        )

    @property
    def key(self) -> RequestKey:
        """Request and attempt."""
        return self.submit.key

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.submit.sampling

    @property
    def num_output(self) -> int:
        """Output tokens so far, over all attempts."""
        return len(self.tokens) - len(self.submit.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 for a sequence that is decoding."""
        return len(self.tokens) - self.num_computed

    def step(self, num_tokens: int, *, samples: bool) -> SequenceStep:
        """What the engine is asked to do next: the first `num_tokens` uncomputed tokens."""
        start = self.num_computed
        history = self.history if samples else None
        return SequenceStep(
            tokens=tuple(self.tokens[start : start + num_tokens]),
            start=start,
            block_ids=tuple(self.block_ids),
            sampling=self.sampling if samples else None,
            banned=self.sampling.banned(self.num_output) if samples else (),
            seen=history.seen() if history else (),
            counts=history.counts() if history else (),
        )

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; say whether, and why, it is the last."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.sampling.ends_with(token, self.num_output):
            return FinishReason.STOP
        if self.num_output >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def mark_start(self, phase: Phase, now: float) -> None:
        """The phase begins (the first call counts)."""
        self.marks.setdefault(phase, [now, now])

    def mark_end(self, phase: Phase, now: float) -> None:
        """The phase has lasted until now."""
        if phase in self.marks:
            self.marks[phase][1] = now

    def spans(self, place: str, counts: dict[Phase, dict[str, int]]) -> tuple[Span, ...]:
        """The phases of this sequence as timeline spans."""
        return tuple(
            Span(phase=phase, start=start, end=end, place=place, counts=counts.get(phase, {}))
            for phase, (start, end) in self.marks.items()
        )
