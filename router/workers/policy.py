"""Which workers serve a request. Pure: views of the workers in, a choice with its reasons out.

Decode is chosen first, because its KV blocks run out first: of the workers with blocks for the
prompt, the one with the fewest sequences, where cached prompt tokens make up for sequences. Then
whether decode prefills by itself: if little of the prompt is uncached there, if no prefill worker
can, or if some decode worker would be done `local_gain_s` sooner. Otherwise the prefill worker that
would be done first, by its backlog and by what it has cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from protocol.ids import WorkerRef
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import WorkerLoad
from router.config import RouterConfig

V = TypeVar("V")

#: Free blocks are compared in this many steps, so that a few more do not attract every router.
_FREE_STEPS = 16
#: Decode prefills the uncached remainder of a prompt when prefill would compute so many times more.
_REMAINDER_GAIN = 4
#: Tokens of KV that are worth a hand-off of their own.
MIN_LOAN_TOKENS = 64
#: What bringing KV from another worker takes, as a share of computing it.
_LOAN_SHARE = 0.1
#: Rate of prompts on a decode worker that has computed none, as a share of prefill's.
_UNMEASURED_SHARE = 0.5


class LocalReason(StrEnum):
    """Why a prompt is prefilled on its decode worker; also a label of the metrics."""

    SHORT_PROMPT = "short_prompt"
    PREFIX_CACHED = "prefix_cached"
    NO_PREFILL_READY = "no_prefill_ready"
    PREFILL_FAILING = "prefill_failing"
    PREFILL_BUSY = "prefill_busy"
    PREFILL_POOL_TOO_SMALL = "prefill_pool_too_small"
    INCOMPATIBLE_KV = "incompatible_kv"


class ChoiceReason(StrEnum):
    """Why a worker was chosen among others; a label of the metrics."""

    ONLY = "only"
    LEAST_LOADED = "least_loaded"
    PREFIX = "prefix"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the choice needs to know of one ready worker.

    capacity: tokens its KV pool and context can hold for one sequence.
    unseen_sequences, unseen_tokens, unseen_blocks: to be added to `load`, which does not show all
        attempts of this router yet (router.workers.bookkeeping).
    cached_tokens: tokens of this prompt in its prefix cache. expected_tokens: the same, with those
        that requests in flight will bring.
    failing: avoided while another worker can take the request.
    """

    ref: WorkerRef
    load: WorkerLoad
    capacity: int
    layout: KVLayout
    fingerprint: KVFingerprint
    unseen_sequences: int = 0
    unseen_tokens: int = 0
    unseen_blocks: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0
    failing: bool = False

    @property
    def free_blocks(self) -> int:
        """Blocks for new sequences; negative when overcommitted."""
        return self.load.free_blocks - self.unseen_blocks

    @property
    def num_sequences(self) -> int:
        """Sequences that it has or is about to have."""
        return max(0, self.load.running + self.load.waiting + self.unseen_sequences)

    @property
    def backlog(self) -> int:
        return max(0, self.load.waiting_tokens + self.unseen_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request needs: prompt tokens to compute (output so far included, after a loss) and the
    tokens that the sequence can grow to."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """A decode worker, and a prefill worker or the reason to do without. `note` is for people."""

    decode: WorkerView
    prefill: WorkerView | None
    decode_reason: ChoiceReason
    prefill_reason: ChoiceReason | LocalReason
    note: str

    @property
    def local_reason(self) -> LocalReason | None:
        reason = self.prefill_reason
        return reason if isinstance(reason, LocalReason) else None


def choose(
    need: Need,
    decodes: Sequence[WorkerView],
    prefills: Sequence[WorkerView],
    *,
    config: RouterConfig,
    rng: random.Random,
    computes: WorkerRef | None = None,
) -> WorkerChoice | None:
    """The pair for a request, or None when no decode worker can hold it. `computes`: the worker
    that should compute the prompt, if it can; it left another one for that."""
    wanted = [view for view in (*decodes, *prefills) if view.ref == computes and not view.failing]
    here = [view for view in wanted if view in decodes and has_room(need, view)]
    here = [view for view in here if view.capacity >= need.total_tokens]
    decode = choose_decode(need, here or decodes, rng, config)
    if decode is None:
        return None
    decode_reason = _reason(decode, len(decodes), has_room=_blocks_left(need, decode) >= 0)
    decode_note = (
        f"decode {decode_reason}: {decode.cached_tokens} tokens cached, "
        f"{decode.free_blocks} blocks free"
    )
    fitting = fitting_prefills(need, decode, prefills)
    fitting = [view for view in fitting if view in wanted] or fitting
    reason = local_reason(need, decode, prefills, fitting, config)
    if reason is None and here:
        reason = LocalReason.PREFILL_BUSY
    if reason is None:
        prefill = choose_prefill(need, fitting, rng, lenders=decodes)
        measured = any(view.load.tokens_per_second > 0 for view in fitting)
        rate = _mean_rate(fitting)
        compares = measured and prefill not in wanted
        sooner = _sooner_on_decode(need, decodes, prefill, rate, config) if compares else None
        if sooner is None:
            wait_s = backlog_s(prefill, rate) if measured else 0.0
            prefill_reason = _reason(prefill, len(fitting), has_room=True)
            return WorkerChoice(
                decode=decode,
                prefill=prefill,
                decode_reason=decode_reason,
                prefill_reason=prefill_reason,
                note=f"prefill {prefill_reason}: {prefill.cached_tokens} tokens cached, "
                f"backlog {wait_s:.2f} s; {decode_note}",
            )
        decode, reason = sooner, LocalReason.PREFILL_BUSY
        decode_reason = _reason(decode, len(decodes), has_room=True)
        decode_note = f"decode: {decode.backlog} tokens of backlog"
    return WorkerChoice(
        decode=decode,
        prefill=None,
        decode_reason=decode_reason,
        prefill_reason=reason,
        note=f"local: {reason}; {decode_note}",
    )


def choose_decode(
    need: Need,
    views: Sequence[WorkerView],
    rng: random.Random,
    config: RouterConfig,
) -> WorkerView | None:
    """With blocks for the prompt: the fewest sequences, waiting ones counted twice, less what the
    cached part of the prompt makes up for; then the most free blocks. Without: the worker that
    lacks the fewest. Ties are broken at random, or every router would pick the same worker."""
    fitting = [view for view in views if view.capacity >= need.total_tokens]
    candidates = [view for view in fitting if not view.failing] or fitting

    def rank(view: WorkerView) -> tuple[int, float, float]:
        left = _blocks_left(need, view)
        if left < 0:
            return 1, -left, view.num_sequences
        cost = view.num_sequences + view.load.waiting
        saved = view.expected_tokens / config.prefix_tokens_per_sequence
        return 0, cost - saved, -(left * _FREE_STEPS // max(1, view.load.total_blocks))

    return _least(candidates, rank, rng)


def fitting_prefills(
    need: Need, decode: WorkerView, views: Sequence[WorkerView]
) -> list[WorkerView]:
    """The working prefill workers whose pool holds the prompt and whose KV decode can use."""
    return [
        view
        for view in views
        if not view.failing
        and view.capacity > need.prompt_tokens
        and view.fingerprint.differing_field(decode.fingerprint) is None
    ]


def local_reason(
    need: Need,
    decode: WorkerView,
    prefills: Sequence[WorkerView],
    fitting: Sequence[WorkerView],
    config: RouterConfig,
) -> LocalReason | None:
    """Why the prompt should be prefilled on its decode worker, or None when it should not."""
    if need.prompt_tokens <= config.local_prefill_tokens:
        return LocalReason.SHORT_PROMPT
    if need.prompt_tokens - decode.cached_tokens <= config.local_prefill_tokens:
        return LocalReason.PREFIX_CACHED
    if not prefills:
        return LocalReason.NO_PREFILL_READY
    if fitting:
        saves = _remainder_is_cheaper(need, decode, fitting, config)
        return LocalReason.PREFIX_CACHED if saves else None
    working = [view for view in prefills if not view.failing]
    if not working:
        return LocalReason.PREFILL_FAILING
    if any(view.fingerprint.differing_field(decode.fingerprint) is None for view in working):
        return LocalReason.PREFILL_POOL_TOO_SMALL
    return LocalReason.INCOMPATIBLE_KV


def choose_prefill(
    need: Need,
    views: Sequence[WorkerView],
    rng: random.Random,
    *,
    lenders: Sequence[WorkerView] = (),
) -> WorkerView:
    """The least sum of seconds until token 1 and seconds of computing for it: an idle worker has to
    be twice as quick to be worth computing what another has cached, or is about to have, unless it
    can take that from there or from one of `lenders`. Ties are broken at random; `views` must not
    be empty.

    An idle worker is taken to be as quick as the quickest: the rate it reports is of whatever it
    was last given, and a worker with a low rate would never be measured again."""
    mean = _mean_rate(views)
    fastest = max(_rate(view, mean) for view in views)

    cached: dict[KVFingerprint, int] = {}
    for view in (*views, *lenders):
        cached[view.fingerprint] = max(cached.get(view.fingerprint, 0), view.cached_tokens)

    def cost_s(view: WorkerView) -> float:
        uncached: float = need.prompt_tokens - view.expected_tokens
        if (lent := cached[view.fingerprint] - view.expected_tokens) >= MIN_LOAN_TOKENS:
            uncached -= (1 - _LOAN_SHARE) * lent
        rate = _rate(view, mean) if view.backlog else fastest
        return backlog_s(view, mean) + 2 * uncached / rate

    best = _least(views, lambda view: (cost_s(view),), rng)
    assert best is not None
    return best


def choose_source(view: WorkerView, others: Sequence[WorkerView]) -> WorkerView | None:
    """The other worker that has most of the prompt, if that is much more than `view` has, which
    computes it. That worker decides whether to take it from there."""
    alike = [
        each for each in others if each.fingerprint == view.fingerprint and each.ref != view.ref
    ]
    best = max(alike, key=lambda each: each.cached_tokens, default=None)
    if best is None or best.cached_tokens - view.expected_tokens < MIN_LOAN_TOKENS:
        return None
    return best


def work_tokens(
    prompt_tokens: int,
    decodes: Sequence[WorkerView],
    prefills: Sequence[WorkerView],
    config: RouterConfig,
) -> int:
    """Tokens of a prompt that some worker will have to compute: those that are not cached on the
    prefill worker that has most of it, or on a decode worker that would compute so few itself."""
    need = Need(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens)
    left = [prompt_tokens - view.expected_tokens for view in prefills or decodes]
    if prefills:
        left += (
            prompt_tokens - view.cached_tokens
            for view in decodes
            if local_reason(need, view, prefills, prefills, config) is not None
        )
    return min(left, default=prompt_tokens)


def backlog_s(view: WorkerView, unknown_rate: float) -> float:
    """Seconds until a prefill worker would reach a new prompt. A worker that has not measured its
    rate yet is taken to run at `unknown_rate` tokens per second."""
    return view.backlog / _rate(view, unknown_rate)


def _remainder_is_cheaper(
    need: Need, decode: WorkerView, prefills: Sequence[WorkerView], config: RouterConfig
) -> bool:
    """Whether decode has so much of the prompt that it should compute the rest, which is little by
    itself and together with what it has to compute already."""
    uncached = need.prompt_tokens - decode.cached_tokens
    if uncached + decode.backlog > config.local_remainder_tokens:
        return False
    on_prefill = min(need.prompt_tokens - view.expected_tokens for view in prefills)
    return _REMAINDER_GAIN * uncached <= on_prefill


def _sooner_on_decode(
    need: Need,
    decodes: Sequence[WorkerView],
    prefill: WorkerView,
    prefill_rate: float,
    config: RouterConfig,
) -> WorkerView | None:
    """The decode worker from which the first token would come `local_gain_s` sooner than from
    `prefill`; None when there is none."""
    if not config.local_gain_s:
        return None
    able = [
        view
        for view in decodes
        if not view.failing and view.capacity >= need.total_tokens and _blocks_left(need, view) >= 0
    ]
    if not able:
        return None

    def local_s(view: WorkerView) -> float:
        rate = view.load.prompt_tokens_per_second or _UNMEASURED_SHARE * prefill_rate
        return (view.backlog + need.prompt_tokens - view.cached_tokens) / rate

    work = prefill.backlog + need.prompt_tokens - prefill.expected_tokens
    best = min(able, key=local_s)
    gain_s = work / _rate(prefill, prefill_rate) - local_s(best)
    return best if gain_s > config.local_gain_s else None


def _reason(view: WorkerView, num_workers: int, *, has_room: bool) -> ChoiceReason:
    if num_workers == 1:
        return ChoiceReason.ONLY
    if not has_room:
        return ChoiceReason.NO_ROOM
    return ChoiceReason.PREFIX if view.expected_tokens else ChoiceReason.LEAST_LOADED


def has_room(need: Need, view: WorkerView) -> bool:
    """Whether a decode worker has blocks for the prompt now."""
    return _blocks_left(need, view) >= 0


def _blocks_left(need: Need, view: WorkerView) -> int:
    """Blocks that would be left. Cached blocks count as free, so those of this prompt are not taken
    off what it needs."""
    return view.free_blocks - view.layout.pages_for(need.prompt_tokens + 1)


def _rate(view: WorkerView, unknown_rate: float) -> float:
    return view.load.tokens_per_second or unknown_rate


def _mean_rate(views: Sequence[WorkerView]) -> float:
    rates = [v.load.tokens_per_second for v in views if v.load.tokens_per_second > 0]
    return sum(rates) / len(rates) if rates else 1.0


def _least(
    views: Sequence[V], rank: Callable[[V], tuple[float, ...]], rng: random.Random
) -> V | None:
    if not views:
        return None
    ranked = [(rank(view), view) for view in views]
    best = min(value for value, _ in ranked)
    return rng.choice([view for value, view in ranked if value == best])
