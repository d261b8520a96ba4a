"""One request as a scheduler sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from engine.batch import SequenceStep, TokenHistory
from engine.kv.tables import BlockTables
from grammar.matcher import Matcher, compute_masks
from kv_tiers.commands import Tier
from protocol.errors import ErrorInfo, InvalidRequest
from protocol.ids import RequestKey
from protocol.messages import PrefixSource, PromptEvent, ScoreEvent, Submit
from protocol.sampling import SamplingParams, TokenLogprobs
from protocol.states import FinishReason
from protocol.timeline import Phase, Span

#: Prompt tokens of one sequence scored in one step: bounds the size of the event.
MAX_SCORED = 512


@dataclass(slots=True, kw_only=True)
class SequenceStats:
    """What is reported of a sequence; no decision depends on it. `phases`: start and end times."""

    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0
    num_chunks: int = 0  # steps that ran prompt tokens
    num_steps: int = 0  # steps that sampled a token
    num_loaded: Counter[Tier] = field(default_factory=Counter)  # tokens, by the tier they came from
    phases: dict[Phase, list[float]] = field(default_factory=dict)

    def begin(self, phase: Phase, now: float) -> None:
        """Start a phase; later calls for the same phase change nothing."""
        self.phases.setdefault(phase, [now, now])

    def end(self, phase: Phase, now: float) -> None:
        """Extend a phase that has begun until now."""
        if phase in self.phases:
            self.phases[phase][1] = now

    def spans(self, place: str, counts: dict[Phase, dict[str, int]]) -> tuple[Span, ...]:
        loaded = {f"{tier}_tokens": count for tier, count in self.num_loaded.items()}
        counts = {**counts, Phase.KV_LOAD: loaded}
        return tuple(
            Span(phase=phase, start=start, end=end, place=place, counts=counts.get(phase, {}))
            for phase, (start, end) in self.phases.items()
        )


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Tokens and KV blocks of one request. Owned and changed by exactly one scheduler.

    Positions of `tokens` (prompt + output so far), in the blocks of `tables`:

        0 ............ num_computed ......... num_launched ......... len(tokens)
        KV is written  steps in flight write  not yet in a step

    While a sampling step is in flight, the position after the last known token counts as a token:
    `num_pending` is 1 for it, 2 once the next step that runs it samples as well. `row` is the
    sequence's row in the newest step launched. `check` holds these as assertions.

    history: counts of the output's tokens, for penalties. matcher: of its grammar.
    scoring: log-probabilities of prompt tokens are wanted and not complete.
    digests: names of its first full blocks (prefix_cache). num_once_computed: tokens whose KV was
    here before a preemption. loading: KV on its way into its blocks; no step runs it meanwhile.
    source: a worker that may have more of its KV, until that was asked (peer_blocks). fetch: the
    copy that brings KV before it has blocks (kv_prefetch).
    """

    submit: Submit
    arrival: float
    deadline: float
    tokens: list[int]
    history: TokenHistory | None = None
    matcher: Matcher | None = None
    scoring: bool = False
    tables: BlockTables = field(default_factory=BlockTables)
    num_computed: int = 0
    num_launched: int = 0
    row: int = 0
    digests: list[bytes] = field(default_factory=list)
    num_once_computed: int = 0
    loading: KVLoad | None = None
    source: PrefixSource | None = None
    fetch: int | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        now: float,
        matcher: Matcher | None = None,
        digests: tuple[bytes, ...] = (),
        tables: BlockTables | None = None,
    ) -> Sequence:
        prompt, output, sampling = submit.prompt_ids, submit.output_ids, submit.sampling
        return cls(
            submit=submit,
            arrival=now - submit.waited_s,
            deadline=now + submit.time_left_s,
            tokens=[*prompt, *output],
            history=TokenHistory(prompt, output, sampling) if sampling.penalised else None,
            matcher=matcher,
            scoring=sampling.prompt_logprobs is not None,
            digests=list(digests),
            tables=tables or BlockTables(),
            source=submit.source,
        )

    # --- what follows from the state ------------------------------------------------------------

    @property
    def keep_until(self) -> float:
        """When the conversation should have returned; 0 when nothing is known. Counts from the
        request's arrival."""
        return self.arrival + self.submit.keep_s if self.submit.keep_s else 0.0

    @property
    def key(self) -> RequestKey:
        return self.submit.key

    @property
    def sampling(self) -> SamplingParams:
        return self.submit.sampling

    @property
    def num_output(self) -> int:
        """Output tokens so far, over all attempts."""
        return len(self.tokens) - len(self.submit.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV; 1 for a decoding sequence."""
        return len(self.tokens) - self.num_computed

    @property
    def in_flight(self) -> bool:
        return self.num_launched > self.num_computed

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight sample: the last of them ran up to the last known token, or
        to one that is pending itself."""
        pending = self.num_launched + 1 - len(self.tokens)
        if pending <= 0 or not self.in_flight or self.sampling.max_tokens == 0:
            return 0
        return pending

    @property
    def ends_next(self) -> bool:
        """Whether its next token is the last one in any case, or no output is wanted."""
        return self.num_output + 1 >= self.sampling.max_tokens

    @property
    def plans_ahead(self) -> bool:
        """Whether a step can be planned before the host knows the token in flight: penalties and
        grammars need it."""
        return self.history is None and self.matcher is None

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached prompt tokens need not run: they must if their logits are wanted."""
        return not self.submit.bypass_prefix_cache and self.sampling.prompt_logprobs is None

    @property
    def num_runnable(self) -> int:
        """Tokens that a step launched now could run: 1 for a decoding sequence, also while that
        token is pending; 0 when a step in flight has to land first or samples the last token."""
        if self.loading is not None:
            return 0
        pending = self.num_pending
        ended = self.num_output + pending >= self.sampling.max_tokens
        if pending and (ended or not self.plans_ahead):
            return 0
        return len(self.tokens) + pending - self.num_launched

    @property
    def prompt_event(self) -> PromptEvent:
        """Reports to the router how much of the prompt was cached."""
        cached = min(self.stats.num_cached_tokens, len(self.submit.prompt_ids))
        return PromptEvent(key=self.key, num_cached_tokens=cached)

    # --- steps ----------------------------------------------------------------------------------

    def chunk(self, num_runnable: int, budget: int) -> tuple[int, bool]:
        """(tokens that a step with room for `budget` runs, whether it samples the next one)."""
        num_tokens = min(num_runnable, budget)
        if self.scoring:
            num_tokens = min(num_tokens, MAX_SCORED)
        return num_tokens, num_tokens == num_runnable and self.sampling.max_tokens > 0

    def launch(self, num_tokens: int, *, samples: bool, row: int) -> SequenceStep:
        """Put the first `num_tokens` runnable tokens in flight, as row `row` of a step."""
        start = self.num_launched
        known = start < len(self.tokens)
        history = self.history if samples else None
        step = SequenceStep(
            tokens=tuple(self.tokens[start : start + num_tokens]) if known else (0,),
            start=start,
            block_tables=self.tables.for_step(start),
            sampling=self.sampling if samples else None,
            banned=self._banned() if samples else (),
            allowed=self._allowed() if samples else None,
            seen=history.seen() if history else b"",
            counts=history.counts() if history else b"",
            targets=self.submit.prompt_ids[start + 1 : start + num_tokens + 1]
            if self.scoring
            else (),
            num_top=self.sampling.prompt_logprobs or 0,
            previous=None if known else self.row,
        )
        self.num_launched += num_tokens
        self.row = row
        return step

    def land(self, num_tokens: int) -> None:
        """The oldest step in flight is over; `append` takes the token that it sampled, if any."""
        self.num_computed += num_tokens

    def resume_at(self, num_computed: int) -> None:
        """KV of the first `num_computed` tokens is in the blocks, and no step is in flight."""
        assert not self.in_flight
        self.num_computed = self.num_launched = num_computed

    def loaded(
        self, num_computed: int, num_blocks: Counter[Tier], block_size: int, now: float
    ) -> None:
        """A load is over: it has brought so many blocks of each tier."""
        self.stats.end(Phase.KV_LOAD, now)
        known = max(self.num_computed, self.num_once_computed)
        self.stats.num_cached_tokens += max(0, num_computed - known)
        for tier, count in num_blocks.items():
            self.stats.num_loaded[tier] += count * block_size
        self.resume_at(num_computed)

    def drop_kv(self) -> list[int]:
        """Give up all KV, with no step in flight; returns the blocks that held it. A copy into them
        may run on: it refers to them itself."""
        if self.loading is not None:
            self.loading.give_up(self)
        self.fetch = None
        self.num_once_computed = max(self.num_once_computed, self.num_computed)
        self.resume_at(0)
        return self.tables.take()

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; the reason when it is the last."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        # A grammar allows an end before min_tokens only where it leaves nothing else.
        grammar_ends = self.matcher is not None and token in self.sampling.eos_token_ids
        if self.sampling.ends_with(token, self.num_output) or grammar_ends:
            return FinishReason.STOP
        if self.num_output >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.matcher is not None:
            self.matcher.take([token])
        return None

    def score(self, logprobs: tuple[TokenLogprobs, ...], num_tokens: int) -> ScoreEvent:
        """The event of a landed step that ran `num_tokens`, while `scoring`. The request finishes
        with its prompt when no output is wanted."""
        start = self.num_computed - num_tokens + 1
        self.scoring = start + len(logprobs) < len(self.submit.prompt_ids)
        finished = self.sampling.max_tokens == 0 and not self.scoring
        finish = FinishReason.LENGTH if finished else None
        return ScoreEvent(key=self.key, start=start, logprobs=logprobs, finish=finish)

    def _allowed(self) -> bytes | None:
        """The mask of its grammar, computed before the step was planned."""
        if self.matcher is None:
            return None
        assert self.matcher.mask is not None
        return self.matcher.mask

    def _banned(self) -> tuple[int, ...]:
        """End tokens before min_tokens, unless the grammar leaves nothing else."""
        banned = self.sampling.banned(self.num_output + self.num_pending)
        if banned and self.matcher is not None and not self.matcher.leaves_any(banned):
            return ()
        return banned


@dataclass(slots=True, kw_only=True)
class KVLoad:
    """KV on its way from lower tiers: of blocks first, first + 1, ... of `sequence`, from tiers[i]
    into blocks[i].

    here: those that have arrived. end: how many are still expected to. num_loading: copies into the
    blocks that run. waiting: sequences that begin with the same blocks. cut_at: when those that a
    file still has to bring are given up. wanted: `sequence` still has the blocks.
    """

    sequence: Sequence
    first: int
    names: list[bytes]
    blocks: list[int]
    tiers: list[Tier]
    here: list[bool]
    end: int
    began: float
    cut_at: float
    num_loading: int = 0
    wanted: bool = True
    waiting: list[Sequence] = field(default_factory=list)

    def give_up(self, sequence: Sequence) -> None:
        """A sequence that this is for, or that waits for it, gives up its blocks."""
        sequence.loading = None
        if sequence is self.sequence and self.wanted:
            self.wanted = False
        else:
            self.waiting = [other for other in self.waiting if other is not sequence]

    def parts(self, segment_blocks: int, max_blocks: int) -> list[tuple[int, int]]:
        """Ranges that one copy can bring: of one tier, of one file, not too large."""
        cuts = [0]
        for at in range(1, len(self.tiers)):
            new_tier = self.tiers[at] is not self.tiers[at - 1]
            from_file = self.tiers[at] is Tier.DISK
            new_file = from_file and (self.first + at) % segment_blocks == 0
            if new_tier or new_file or at - cuts[-1] == max_blocks:
                cuts.append(at)
        return list(pairwise([*cuts, len(self.tiers)]))

    def file_of(self, at: int, segment_blocks: int) -> tuple[bytes, int]:
        """The name of the segment that a block is in, that of its last one, and its place there."""
        number = self.first + at
        last = (number // segment_blocks + 1) * segment_blocks - 1
        return self.sequence.digests[last], number % segment_blocks

    @property
    def num_here(self) -> int:
        """Leading blocks that have arrived."""
        return next((i for i, here in enumerate(self.here) if not here), len(self.here))

    @property
    def over(self) -> bool:
        """Whether nothing more comes, and no copy writes to the blocks."""
        return not self.num_loading and (not self.wanted or self.num_here >= self.end)


def constrain(sequences: Iterable[Sequence]) -> list[tuple[RequestKey, ErrorInfo]]:
    """Compute the masks of sequences with new tokens; errors of those whose grammar gives up."""
    constrained = [(s.key, s.matcher) for s in sequences if s.matcher is not None]
    compute_masks(matcher for _, matcher in constrained)
    return [
        (key, InvalidRequest(f"grammar: {matcher.error}", param="grammar").info())
        for key, matcher in constrained
        if matcher.error
    ]
