"""One request as a scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch import SequenceStep, TokenHistory
from grammar.matcher import Matcher
from protocol.ids import RequestKey
from protocol.logprobs import TokenLogprobs
from protocol.messages import PromptEvent, ScoreEvent, Submit
from protocol.sampling import SamplingParams
from protocol.states import FinishReason
from protocol.timeline import Phase, Span

#: Prompt tokens of one sequence that one step scores: bounds the message that tells of them.
MOST_SCORED = 512


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Tokens, blocks and marks of one request. Owned and changed by exactly one scheduler.

    `tokens` are prompt + output so far; positions 0 .. num_computed - 1 have their KV in
    `block_ids`. Steps that were launched and are not over run `num_in_flight` tokens after those
    and will sample `num_pending` tokens; the newest of these as number `index` of its batch.
    `history` is there when the sampling has penalties, `matcher` when there is a grammar.
    `scoring` lasts until the log-probabilities of the prompt are out, where they are wanted.

    `digests` name its full blocks as far as anybody has asked; the first `num_named` of its blocks
    can be shared, the first `num_reusable` could come from others; `num_cached_tokens` were not
    computed for it. The first `num_once_computed` had their KV here before it was preempted.
    """

    submit: Submit
    arrival: float
    deadline: float
    tokens: list[int]
    history: TokenHistory | None = None
    matcher: Matcher | None = None
    scoring: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    index: int | None = None
    digests: list[bytes] = field(default_factory=list)
    num_named: int = 0
    num_reusable: int = 0
    num_cached_tokens: int = 0
    num_once_computed: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_chunks: int = 0
    marks: dict[Phase, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, submit: Submit, now: float, matcher: Matcher | None = None) -> Sequence:
        """The sequence of a request that has just arrived."""
        prompt, output, sampling = submit.prompt_ids, submit.output_ids, submit.sampling
        return cls(
            submit=submit,
            arrival=now,
            deadline=now + submit.time_left_s,
            tokens=[*prompt, *output],
            history=TokenHistory(prompt, output, sampling) if sampling.penalised else None,
            matcher=matcher,
            scoring=sampling.prompt_logprobs is not None,
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

    @property
    def ends_next(self) -> bool:
        """Whether its next token is the last whichever it is, or none is wanted."""
        return self.num_output + 1 >= self.sampling.max_tokens

    @property
    def reuses_prefix(self) -> bool:
        """Whether prompt tokens whose KV is there need not run: not if their logits are wanted."""
        return not self.submit.bypass_prefix_cache and self.sampling.prompt_logprobs is None

    @property
    def prompt_event(self) -> PromptEvent:
        """What routers are told of its prompt."""
        cached = min(self.num_cached_tokens, len(self.submit.prompt_ids))
        return PromptEvent(key=self.key, num_cached_tokens=cached)

    @property
    def plans_ahead(self) -> bool:
        """Whether its next token can be chosen before the host knows the one in flight."""
        return self.history is None and self.matcher is None

    @property
    def num_runnable(self) -> int:
        """Tokens that a step launched now could run: 1 for a sequence that is decoding, also while
        that token is being sampled; 0 when what is in flight must be seen first or is the end."""
        ended = self.num_output + self.num_pending >= self.sampling.max_tokens
        if self.num_pending and (ended or not self.plans_ahead):
            return 0
        return len(self.tokens) + self.num_pending - self.num_computed - self.num_in_flight

    def part(self, num_runnable: int, budget: int) -> tuple[int, bool]:
        """How many of its runnable tokens a step with room for `budget` runs, and whether it
        samples the one after them."""
        num_tokens = (
            min(num_runnable, budget, MOST_SCORED) if self.scoring else min(num_runnable, budget)
        )
        return num_tokens, num_tokens == num_runnable and self.sampling.max_tokens > 0

    def launch(self, num_tokens: int, *, samples: bool, index: int) -> SequenceStep:
        """What the engine is asked to do next: the first `num_tokens` runnable tokens, as number
        `index` of a batch. Until `land` they are in flight."""
        start = self.num_computed + self.num_in_flight
        known = start < len(self.tokens)
        history = self.history if samples else None
        step = SequenceStep(
            tokens=tuple(self.tokens[start : start + num_tokens]) if known else (0,),
            start=start,
            block_ids=tuple(self.block_ids),
            sampling=self.sampling if samples else None,
            banned=self._banned() if samples else (),
            allowed=self._allowed() if samples else None,
            seen=history.seen() if history else b"",
            counts=history.counts() if history else b"",
            targets=self._targets(start, num_tokens) if self.scoring else (),
            num_top=self.sampling.prompt_logprobs or 0,
            previous=None if known else self.index,
        )
        self.num_in_flight += num_tokens
        self.num_pending += samples
        self.index = index
        return step

    def land(self, num_tokens: int, *, samples: bool) -> None:
        """The oldest step in flight is over; the token it sampled, if any, is appended by
        `append`."""
        self.num_in_flight -= num_tokens
        self.num_computed += num_tokens
        self.num_pending -= samples

    def drop_kv(self) -> list[int]:
        """Let go of all KV; the blocks that held it."""
        blocks, self.block_ids = self.block_ids, []
        self.num_once_computed = max(self.num_once_computed, self.num_computed)
        self.num_computed = 0
        return blocks

    def _allowed(self) -> bytes | None:
        """The ids that the grammar leaves; `constrain` has come before."""
        if self.matcher is None:
            return None
        assert self.matcher.mask is not None
        return self.matcher.mask

    def _banned(self) -> tuple[int, ...]:
        """Ends before min_tokens, unless the grammar leaves nothing else."""
        banned = self.sampling.banned(self.num_output + self.num_pending)
        if banned and self.matcher is not None and not self.matcher.leaves_any(banned):
            return ()
        return banned

    def _grammar_ends(self, token: int) -> bool:
        """An end is only allowed before min_tokens where the grammar leaves nothing else."""
        return self.matcher is not None and token in self.sampling.eos_token_ids

    def _targets(self, start: int, num_tokens: int) -> tuple[int, ...]:
        return self.submit.prompt_ids[start + 1 : start + num_tokens + 1]

    def score(self, logprobs: tuple[TokenLogprobs, ...], num_tokens: int) -> ScoreEvent:
        """What to tell of a step that has landed, while `scoring`: it ran `num_tokens`. The request
        ends with its prompt when no output is wanted."""
        start = self.num_computed - num_tokens + 1
        self.scoring = start + len(logprobs) < len(self.submit.prompt_ids)
        ended = self.sampling.max_tokens == 0 and not self.scoring
        finish = FinishReason.LENGTH if ended else None
        return ScoreEvent(key=self.key, start=start, logprobs=logprobs, finish=finish)

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; say whether, and why, it is the last."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.sampling.ends_with(token, self.num_output) or self._grammar_ends(token):
            return FinishReason.STOP
        if self.num_output >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.matcher is not None:
            self.matcher.take([token])
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
