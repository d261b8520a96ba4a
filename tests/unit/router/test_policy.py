"""Pair choice: single decisions, and load over time in a simulation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from protocol.ids import Role, WorkerRef
from protocol.messages import WorkerLoad
from router.policy import (
    LocalReason,
    Need,
    WorkerView,
    backlog_s,
    choose,
    choose_decode,
    choose_prefill,
)
from tests.support.stub_workers import FINGERPRINT

NEED = Need(prompt_tokens=100, total_tokens=200)


def view(name: str, role: Role = Role.DECODE, *, capacity: int = 8192, **load: float) -> WorkerView:
    unseen = {
        field: int(load.pop(field, 0))
        for field in ("unseen_sequences", "unseen_tokens", "pending_blocks")
    }
    defaults = {"free_blocks": 1000, "total_blocks": 1000}
    return WorkerView(
        ref=WorkerRef(worker_id=name, epoch=1, role=role, address=name),
        load=WorkerLoad(**(defaults | load)),  # type: ignore[arg-type]
        capacity=capacity,
        block_size=16,
        fingerprint=FINGERPRINT,
        **unseen,
    )


def prefill(name: str, **load: float) -> WorkerView:
    return view(name, Role.PREFILL, **load)


def pick(*views: WorkerView, need: Need = NEED) -> str:
    best = choose_decode(need, views, random.Random(0))
    assert best is not None
    return best.ref.worker_id


def decide(
    decodes: list[WorkerView], prefills: list[WorkerView], need: Need = NEED, local: int = 32
):
    return choose(need, decodes, prefills, local_tokens=local, rng=random.Random(0))


def test_decode_with_the_fewest_sequences() -> None:
    assert pick(view("a", running=3), view("b", running=1, waiting=1)) == "b"
    assert pick(view("a", running=3), view("b", running=1, unseen_sequences=3)) == "a"


def test_room_comes_before_load() -> None:
    assert pick(view("a", running=0, free_blocks=3), view("b", running=50, free_blocks=10)) == "b"
    # 101 tokens need 7 blocks: this router has asked for 4 of the 10 already
    assert pick(view("a", free_blocks=10, pending_blocks=4), view("b", running=9)) == "b"


def test_without_room_anywhere_the_least_lacking() -> None:
    assert pick(view("a", free_blocks=2), view("b", free_blocks=4, running=20)) == "b"


def test_a_pool_that_can_never_hold_it_is_not_chosen() -> None:
    assert pick(view("a", capacity=199), view("b", capacity=200, running=90)) == "b"
    assert choose_decode(NEED, [view("a", capacity=199)], random.Random(0)) is None
    assert choose_decode(NEED, [], random.Random(0)) is None


def test_ties_are_broken_at_random() -> None:
    rng = random.Random(1)
    views = [view(name) for name in "abcd"]
    picks = Counter(choose_decode(NEED, views, rng).ref.worker_id for _ in range(400))
    assert set(picks) == set("abcd")
    assert max(picks.values()) < 160


def test_prefill_by_seconds_not_by_tokens() -> None:
    slow = prefill("slow", waiting_tokens=500, tokens_per_second=100.0)
    fast = prefill("fast", waiting_tokens=2000, tokens_per_second=1000.0)
    assert choose_prefill([slow, fast], random.Random(0)).ref.worker_id == "fast"
    busy = replace(fast, unseen_tokens=4000)
    assert choose_prefill([slow, busy], random.Random(0)).ref.worker_id == "slow"


def test_a_worker_without_a_measured_rate_is_taken_as_average() -> None:
    new = prefill("new", waiting_tokens=100)
    known = prefill("known", waiting_tokens=200, tokens_per_second=50.0)
    assert choose_prefill([new, known], random.Random(0)).ref.worker_id == "new"
    assert backlog_s(new, 50.0) == 2.0


@pytest.mark.parametrize(("tokens", "local"), [(32, True), (33, False)])
def test_short_prompts_stay_on_decode(tokens: int, local: bool) -> None:
    need = Need(prompt_tokens=tokens, total_tokens=tokens + 1)
    choice = decide([view("d")], [prefill("p")], need)
    assert (choice.local_reason is LocalReason.SHORT_PROMPT) == local
    assert (choice.prefill is None) == local


def test_reasons_to_prefill_locally() -> None:
    assert decide([view("d")], []).local_reason is LocalReason.NO_PREFILL_READY
    small = prefill("p", capacity=100)
    assert decide([view("d")], [small]).local_reason is LocalReason.PREFILL_POOL_TOO_SMALL
    other = replace(prefill("p"), fingerprint=replace(FINGERPRINT, dtype="bfloat16"))
    assert decide([view("d")], [other]).local_reason is LocalReason.INCOMPATIBLE_KV
    assert decide([view("d")], [small, prefill("q")]).prefill.ref.worker_id == "q"


def test_no_decode_no_choice() -> None:
    assert decide([], [prefill("p")]) is None


def test_every_choice_says_why() -> None:
    assert decide([view("d")], []).why == "local: no_prefill_ready"
    assert "backlog" in decide([view("d")], [prefill("p")]).why


def test_simulated_decode_load_stays_even() -> None:
    """4 decode workers, Poisson arrivals, long outputs, one worker half the size of the others."""
    rng = random.Random(3)
    total = {"a": 400, "b": 400, "c": 400, "d": 200}
    ends: dict[str, list[float]] = {name: [] for name in total}
    gaps, overcommitted, now = [], 0, 0.0
    for _ in range(3000):
        now += rng.expovariate(40.0)
        for name in ends:
            ends[name] = [end for end in ends[name] if end > now]
        views = [
            view(
                name,
                running=len(ends[name]),
                free_blocks=total[name] - 10 * len(ends[name]),
                total_blocks=total[name],
            )
            for name in total
        ]
        chosen = choose_decode(NEED, views, rng).ref.worker_id
        ends[chosen].append(now + rng.uniform(1.0, 3.0))
        counts = [len(ends[name]) for name in total]
        gaps.append(max(counts[:3]) - min(counts[:3]))
        overcommitted += any(10 * len(ends[name]) > total[name] for name in total)
    assert sum(gaps) / len(gaps) < 2.5  # of about 20; sequences end at random
    assert max(gaps) < 10
    assert overcommitted == 0


def test_simulated_prefill_backlog_follows_the_rates() -> None:
    """3 prefill workers with rates 1 : 2 : 4; work goes to them in about that proportion."""
    rng = random.Random(5)
    rates = {"a": 1000.0, "b": 2000.0, "c": 4000.0}
    backlog = dict.fromkeys(rates, 0.0)
    given: Counter[str] = Counter()
    for _ in range(4000):
        tokens = rng.choice([50, 200, 1000])
        views = [
            prefill(name, waiting_tokens=int(backlog[name]), tokens_per_second=rates[name])
            for name in rates
        ]
        chosen = choose_prefill(views, rng).ref.worker_id
        backlog[chosen] += tokens
        given[chosen] += tokens
        for name in rates:
            backlog[name] = max(0.0, backlog[name] - rates[name] * 0.06)
    shares = [given[name] / sum(given.values()) for name in rates]
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05)
    waits = [backlog[name] / rates[name] for name in rates]
    assert max(waits) - min(waits) < 1.2
