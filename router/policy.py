"""Which workers serve a request. Pure: views of the workers in, a choice with its reason out.

Decode first, because room there is what runs out: a worker with room for the prompt, of those the
one with the fewest sequences. Then whether to disaggregate at all. Then prefill, by seconds of
backlog.
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

V = TypeVar("V")

#: Free room is compared in this many steps, so that a few blocks more do not attract every router.
_ROOM_STEPS = 16


class LocalReason(StrEnum):
    """Why a prompt is prefilled on its decode worker; also a label of the metrics."""

    SHORT_PROMPT = "short_prompt"
    NO_PREFILL_READY = "no_prefill_ready"
    PREFILL_POOL_TOO_SMALL = "prefill_pool_too_small"
    INCOMPATIBLE_KV = "incompatible_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the choice needs to know of one ready worker.

    capacity: tokens its KV pool and context can hold for one sequence.
    unseen_sequences, unseen_tokens: submitted by this router, not yet in the reported load.
    pending_blocks: asked of this decode worker by requests that have no token yet, so that its
        report of free blocks may or may not include them; counted as gone, to be safe.
    """

    ref: WorkerRef
    load: WorkerLoad
    capacity: int
    block_size: int
    fingerprint: KVFingerprint
    unseen_sequences: int = 0
    unseen_tokens: int = 0
    pending_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request needs: prompt tokens to compute (output so far included, after a loss) and the
    most tokens the sequence can grow to."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decode worker, and a prefill worker or the reason to do without. `why` is for people."""

    decode: WorkerView
    prefill: WorkerView | None
    local_reason: LocalReason | None
    why: str


def choose(
    need: Need,
    decodes: Sequence[WorkerView],
    prefills: Sequence[WorkerView],
    *,
    local_tokens: int,
    rng: random.Random,
) -> Choice | None:
    """The pair for a request, or None when no decode worker can hold it."""
    decode = choose_decode(need, decodes, rng)
    if decode is None:
        return None
    fitting = fitting_prefills(need, decode, prefills)
    reason = local_reason(need, decode, prefills, fitting, local_tokens=local_tokens)
    if reason is not None:
        return Choice(decode=decode, prefill=None, local_reason=reason, why=f"local: {reason}")
    prefill = choose_prefill(fitting, rng)
    wait = backlog_s(prefill, _mean_rate(fitting))
    return Choice(
        decode=decode,
        prefill=prefill,
        local_reason=None,
        why=f"prefill backlog {wait:.2f} s, decode room {room(decode)} blocks",
    )


def choose_decode(need: Need, views: Sequence[WorkerView], rng: random.Random) -> WorkerView | None:
    """With room for the prompt: the fewest sequences, then the most room. If nobody has room: the
    one that lacks least. Ties are broken at random, or every router would pick the same worker."""
    fitting = [view for view in views if view.capacity >= need.total_tokens]

    def rank(view: WorkerView) -> tuple[int, float, float]:
        blocks = -(-(need.prompt_tokens + 1) // view.block_size)
        left = room(view) - blocks
        if left < 0:
            return 1, -left, sequences(view)
        return 0, sequences(view), -(left * _ROOM_STEPS // max(1, view.load.total_blocks))

    return _least(fitting, rank, rng)


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
    if not prefills:
        return LocalReason.NO_PREFILL_READY
    if fitting:
        return None
    if any(view.fingerprint == decode.fingerprint for view in prefills):
        return LocalReason.PREFILL_POOL_TOO_SMALL
    return LocalReason.INCOMPATIBLE_KV


def choose_prefill(views: Sequence[WorkerView], rng: random.Random) -> WorkerView:
    """The shortest backlog in seconds; ties at random. `views` must not be empty."""
    rate = _mean_rate(views)
    best = _least(views, lambda view: (backlog_s(view, rate),), rng)
    assert best is not None
    return best


def backlog_s(view: WorkerView, unknown_rate: float) -> float:
    """Seconds until a prefill worker would reach a new prompt. A worker that has not measured its
    rate yet is taken to run at `unknown_rate` tokens per second."""
    rate = view.load.tokens_per_second or unknown_rate
    return (view.load.waiting_tokens + view.unseen_tokens) / rate


def room(view: WorkerView) -> int:
    """Blocks of a decode worker that this router may count on; negative when overcommitted."""
    return view.load.free_blocks - view.pending_blocks


def sequences(view: WorkerView) -> int:
    """Sequences that a worker has or is about to have."""
    return view.load.running + view.load.waiting + view.unseen_sequences


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
