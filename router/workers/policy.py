"""Which workers serve a request. Pure: views of the workers in, a choice with its reason out.

Decode first, because room there is what runs out: a worker with room for the prompt, of those the
one with the fewest sequences, where prompt tokens that it has in its prefix cache make up for
sequences. Then whether to disaggregate at all: a short part that is not cached is computed on
decode. Then prefill: where the prompt is done soonest and with the least work, by backlog and by
what is cached there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from protocol.ids import WorkerRef
from protocol.kv_layout import KVFingerprint
from protocol.messages import WorkerLoad
from router.config import RouterConfig

V = TypeVar("V")

#: Free room is compared in this many steps, so that a few blocks more do not attract every router.
_ROOM_STEPS = 16


class LocalReason(StrEnum):
    """Why a prompt is prefilled on its decode worker; also a label of the metrics."""

    SHORT_PROMPT = "short_prompt"
    PREFIX_CACHED = "prefix_cached"
    NO_PREFILL_READY = "no_prefill_ready"
    PREFILL_BUSY = "prefill_busy"
    PREFILL_POOL_TOO_SMALL = "prefill_pool_too_small"
    INCOMPATIBLE_KV = "incompatible_kv"


class Ground(StrEnum):
    """Why a worker was chosen among others; a label of the metrics."""

    ONLY = "only"
    LEAST_LOADED = "least_loaded"
    PREFIX = "prefix"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the choice needs to know of one ready worker.

    capacity: tokens its KV pool and context can hold for one sequence.
    unseen_sequences, unseen_tokens: submitted by this router, not yet in the reported load.
    pending_blocks: asked of this decode worker by requests that have no token yet, so that its
        report of free blocks may or may not include them; counted as gone, to be safe.
    cached_tokens: tokens of this prompt in its prefix cache. expected_tokens: the same, with those
        that requests under way will bring.
    """

    ref: WorkerRef
    load: WorkerLoad
    capacity: int
    block_size: int
    fingerprint: KVFingerprint
    unseen_sequences: int = 0
    unseen_tokens: int = 0
    pending_blocks: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request needs: prompt tokens to compute (output so far included, after a loss) and the
    most tokens the sequence can grow to."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """A decode worker, and a prefill worker or the reason to do without. `why` is for people."""

    decode: WorkerView
    prefill: WorkerView | None
    decode_ground: Ground
    prefill_ground: Ground | LocalReason
    why: str

    @property
    def local_reason(self) -> LocalReason | None:
        """Why there is no prefill worker."""
        ground = self.prefill_ground
        return ground if isinstance(ground, LocalReason) else None


def choose(
    need: Need,
    decodes: Sequence[WorkerView],
    prefills: Sequence[WorkerView],
    *,
    config: RouterConfig,
    rng: random.Random,
) -> WorkerChoice | None:
    """The pair for a request, or None when no decode worker can hold it."""
    decode = choose_decode(need, decodes, rng, config)
    if decode is None:
        return None
    ground = _ground(decode, len(decodes), has_room=_left(need, decode) >= 0)
    here = f"decode {ground}: {decode.cached_tokens} tokens cached, room {room(decode)} blocks"
    fitting = fitting_prefills(need, decode, prefills)
    reason = local_reason(need, decode, prefills, fitting, local_tokens=config.local_prefill_tokens)
    if reason is None:
        prefill = choose_prefill(need, fitting, rng)
        measured = any(view.load.tokens_per_second > 0 for view in fitting)
        wait_s = backlog_s(prefill, _mean_rate(fitting)) if measured else 0.0
        if not _spills(decode, wait_s, config):
            there = _ground(prefill, len(fitting), has_room=True)
            return WorkerChoice(
                decode=decode,
                prefill=prefill,
                decode_ground=ground,
                prefill_ground=there,
                why=f"prefill {there}: {prefill.cached_tokens} tokens cached, "
                f"backlog {wait_s:.2f} s; {here}",
            )
        reason = LocalReason.PREFILL_BUSY
    return WorkerChoice(
        decode=decode,
        prefill=None,
        decode_ground=ground,
        prefill_ground=reason,
        why=f"local: {reason}; {here}",
    )


def _spills(decode: WorkerView, wait_s: float, config: RouterConfig) -> bool:
    """Whether decode computes a prompt that prefill would reach only after `wait_s`."""
    computes_one = decode.load.waiting_tokens + decode.unseen_tokens > 0
    return 0.0 < config.local_backlog_s < wait_s and not computes_one


def _ground(view: WorkerView, num_workers: int, *, has_room: bool) -> Ground:
    if num_workers == 1:
        return Ground.ONLY
    if not has_room:
        return Ground.NO_ROOM
    return Ground.PREFIX if view.expected_tokens else Ground.LEAST_LOADED


def choose_decode(
    need: Need,
    views: Sequence[WorkerView],
    rng: random.Random,
    config: RouterConfig,
) -> WorkerView | None:
    """With room for the prompt: the fewest sequences, those that wait counted twice, less what the
    cached part of the prompt makes up for; then the most room. If nobody has room: the one that
    lacks least. Ties are broken at random, or every router would pick the same worker."""
    fitting = [view for view in views if view.capacity >= need.total_tokens]

    def rank(view: WorkerView) -> tuple[int, float, float]:
        left = _left(need, view)
        if left < 0:
            return 1, -left, sequences(view)
        cost = sequences(view) + view.load.waiting
        saved = view.expected_tokens / config.prefix_tokens_per_sequence
        return 0, cost - saved, -(left * _ROOM_STEPS // max(1, view.load.total_blocks))

    return _least(fitting, rank, rng)


def _left(need: Need, view: WorkerView) -> int:
    """Blocks of room that would be left. Cached blocks count as room too, so those of this prompt
    are not taken off what it needs."""
    return room(view) + -(need.prompt_tokens + 1) // view.block_size


def fitting_prefills(
    need: Need, decode: WorkerView, views: Sequence[WorkerView]
) -> list[WorkerView]:
    """The prefill workers whose pool holds the prompt and whose KV means the same as decode's."""
    return [
        view
        for view in views
        if view.capacity > need.prompt_tokens and view.fingerprint == decode.fingerprint
    ]


def local_reason(
    need: Need,
    decode: WorkerView,
    prefills: Sequence[WorkerView],
    fitting: Sequence[WorkerView],
    *,
    local_tokens: int,
) -> LocalReason | None:
    """Why the prompt should be prefilled on its decode worker, or None when it should not."""
    if need.prompt_tokens <= local_tokens:
        return LocalReason.SHORT_PROMPT
    if need.prompt_tokens - decode.cached_tokens <= local_tokens:
        return LocalReason.PREFIX_CACHED
    if not prefills:
        return LocalReason.NO_PREFILL_READY
    if fitting:
        return None
    if any(view.fingerprint == decode.fingerprint for view in prefills):
        return LocalReason.PREFILL_POOL_TOO_SMALL
    return LocalReason.INCOMPATIBLE_KV


def choose_prefill(need: Need, views: Sequence[WorkerView], rng: random.Random) -> WorkerView:
    """Where the prompt would be done first, and with the least work: seconds until token 1 plus
    seconds of computing for it, so that an idle worker has to be twice as quick to be worth
    computing what another has, or is about to have. Ties at random; `views` must not be empty.

    An idle worker is taken to be as quick as the quickest: the rate it reports is of whatever it
    was last given, and another one would never be measured if the slower was never asked again."""
    mean = _mean_rate(views)
    fastest = max(_rate(view, mean) for view in views)

    def cost_s(view: WorkerView) -> float:
        uncached = need.prompt_tokens - view.expected_tokens
        rate = _rate(view, mean) if _backlog(view) else fastest
        return backlog_s(view, mean) + 2 * uncached / rate

    best = _least(views, lambda view: (cost_s(view),), rng)
    assert best is not None
    return best


def backlog_s(view: WorkerView, unknown_rate: float) -> float:
    """Seconds until a prefill worker would reach a new prompt. A worker that has not measured its
    rate yet is taken to run at `unknown_rate` tokens per second."""
    return _backlog(view) / _rate(view, unknown_rate)


def room(view: WorkerView) -> int:
    """Blocks of a decode worker that this router may count on; negative when overcommitted."""
    return view.load.free_blocks - view.pending_blocks


def sequences(view: WorkerView) -> int:
    """Sequences that a worker has or is about to have."""
    return view.load.running + view.load.waiting + view.unseen_sequences


def _backlog(view: WorkerView) -> int:
    return view.load.waiting_tokens + view.unseen_tokens


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
