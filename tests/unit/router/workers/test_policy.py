"""Pair choice: single decisions, and load over time in a simulation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from protocol.ids import Role, WorkerRef
from protocol.kv_layout import KVLayout
from protocol.messages import WorkerLoad
from router.config import RouterConfig
from router.workers.policy import (
    ChoiceReason,
    LocalReason,
    Need,
    WorkerChoice,
    WorkerView,
    backlog_s,
    choose,
    choose_decode,
    choose_prefill,
    choose_source,
    work_tokens,
)
from tests.support.blocks import FINGERPRINT

CONFIG = RouterConfig(model_path="tiny")
NEED = Need(prompt_tokens=100, total_tokens=200)
LAYOUT = KVLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    num_blocks=1000,
    dtype="float32",
    rank_heads=((0, 1),),
)


def view(name: str, role: Role = Role.DECODE, *, capacity: int = 8192, **load: float) -> WorkerView:
    unseen = {
        field: int(load.pop(field, 0))
        for field in (
            *("unseen_sequences", "unseen_tokens", "unseen_blocks"),
            *("cached_tokens", "expected_tokens", "failing"),
        )
    }
    unseen["expected_tokens"] = max(unseen["expected_tokens"], unseen["cached_tokens"])
    defaults = {"free_blocks": 1000, "total_blocks": 1000}
    return WorkerView(
        ref=WorkerRef(worker_id=name, epoch=1, role=role, address=name),
        load=WorkerLoad(**(defaults | load)),  # type: ignore[arg-type]
        capacity=capacity,
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        **unseen,
    )


def load(**values: float) -> WorkerLoad:
    return WorkerLoad(**({"free_blocks": 1000, "total_blocks": 1000} | values))  # type: ignore[arg-type]


def prefill(name: str, **load: float) -> WorkerView:
    return view(name, Role.PREFILL, **load)


def pick(*views: WorkerView, need: Need = NEED) -> str:
    best = choose_decode(need, views, random.Random(0), CONFIG)
    assert best is not None
    return best.ref.worker_id


def decide(
    decodes: list[WorkerView], prefills: list[WorkerView], need: Need = NEED, local: int = 32
):
    config = replace(CONFIG, local_prefill_tokens=local, prefix_tokens_per_sequence=50)
    return choose(need, decodes, prefills, config=config, rng=random.Random(0))


def test_decode_with_the_fewest_sequences() -> None:
    assert pick(view("a", running=3), view("b", running=0, waiting=1)) == "b"
    assert pick(view("a", running=3), view("b", running=1, waiting=2)) == "a"
    assert pick(view("a", running=3), view("b", running=1, unseen_sequences=3)) == "a"


def test_room_comes_before_load() -> None:
    assert pick(view("a", running=0, free_blocks=3), view("b", running=50, free_blocks=10)) == "b"
    # 101 tokens need 7 blocks: this router has asked for 4 of the 10 already
    assert pick(view("a", free_blocks=10, unseen_blocks=4), view("b", running=9)) == "b"


def test_without_room_anywhere_the_least_lacking() -> None:
    assert pick(view("a", free_blocks=2), view("b", free_blocks=4, running=20)) == "b"


def test_a_pool_that_can_never_hold_it_is_not_chosen() -> None:
    assert pick(view("a", capacity=199), view("b", capacity=200, running=90)) == "b"
    assert choose_decode(NEED, [view("a", capacity=199)], random.Random(0), CONFIG) is None
    assert choose_decode(NEED, [], random.Random(0), CONFIG) is None


def test_ties_are_broken_at_random() -> None:
    rng = random.Random(1)
    views = [view(name) for name in "abcd"]
    picks = Counter(choose_decode(NEED, views, rng, CONFIG).ref.worker_id for _ in range(400))
    assert set(picks) == set("abcd")
    assert max(picks.values()) < 160


def test_prefill_by_seconds_not_by_tokens() -> None:
    slow = prefill("slow", waiting_tokens=500, tokens_per_second=100.0)
    fast = prefill("fast", waiting_tokens=2000, tokens_per_second=1000.0)
    assert choose_prefill(NEED, [slow, fast], random.Random(0)).ref.worker_id == "fast"
    busy = replace(fast, unseen_tokens=6000)
    assert choose_prefill(NEED, [slow, busy], random.Random(0)).ref.worker_id == "slow"


def test_idle_prefill_workers_share_the_work_whatever_they_last_measured() -> None:
    """A worker reports a rate only of what it computes, so none may be left out for good."""
    rng = random.Random(2)
    idle = [prefill("a", tokens_per_second=1000.0), prefill("b", tokens_per_second=400.0)]
    idle.append(prefill("c"))
    picks = Counter(choose_prefill(NEED, idle, rng).ref.worker_id for _ in range(600))
    assert set(picks) == set("abc")
    assert max(picks.values()) < 240
    holder = prefill("holder", cached_tokens=16, tokens_per_second=400.0)
    assert choose_prefill(NEED, [*idle, holder], rng) is holder
    busy = prefill("busy", waiting_tokens=1, tokens_per_second=1000.0)
    assert choose_prefill(NEED, [busy, idle[1]], rng) is idle[1]


def test_a_worker_without_a_measured_rate_is_taken_as_average() -> None:
    new = prefill("new", waiting_tokens=100)
    known = prefill("known", waiting_tokens=200, tokens_per_second=50.0)
    assert choose_prefill(NEED, [new, known], random.Random(0)).ref.worker_id == "new"
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
    other = replace(prefill("p"), fingerprint=structs.replace(FINGERPRINT, dtype="bfloat16"))
    assert decide([view("d")], [other]).local_reason is LocalReason.INCOMPATIBLE_KV
    assert decide([view("d")], [small, prefill("q")]).prefill.ref.worker_id == "q"


def chosen(
    decodes: list[WorkerView], prefills: list[WorkerView], gain_s: float = 0.5
) -> WorkerChoice:
    config = replace(CONFIG, local_gain_s=gain_s)
    choice = choose(NEED, decodes, prefills, config=config, rng=random.Random(0))
    assert choice is not None
    assert (choice.prefill is None) == (choice.local_reason is not None)
    return choice


def test_a_prompt_whose_first_token_would_come_sooner_from_decode_is_computed_there() -> None:
    """A prompt of 100 tokens takes prefill 0.1 s and decode 0.2 s by itself."""

    def reason(waiting: int, gain_s: float = 0.5, **decode: float) -> str | None:
        busy = prefill("p", waiting_tokens=waiting, tokens_per_second=1000.0)
        able = view("d", **({"prompt_tokens_per_second": 500.0} | decode))
        return chosen([able], [busy], gain_s).local_reason

    assert reason(601) is LocalReason.PREFILL_BUSY
    assert reason(599) is None
    assert reason(601, running=50) is LocalReason.PREFILL_BUSY  # streams slow its rate down
    assert reason(601, waiting_tokens=1) is None
    assert reason(601, unseen_tokens=1) is None
    assert reason(851, waiting_tokens=125) is LocalReason.PREFILL_BUSY
    # Half of prefill's rate until it has measured its own.
    assert reason(601, prompt_tokens_per_second=0.0) is LocalReason.PREFILL_BUSY
    assert reason(599, prompt_tokens_per_second=0.0) is None
    assert reason(10**6, gain_s=0.0) is None
    assert reason(10**6, free_blocks=3) is None
    unmeasured = prefill("p", waiting_tokens=10**6)
    assert chosen([view("d")], [unmeasured]).local_reason is None


def test_of_several_decode_workers_the_first_to_be_done_computes_the_prompt() -> None:
    busy = prefill("p", waiting_tokens=5000, tokens_per_second=1000.0)
    slow = view("slow", prompt_tokens_per_second=100.0)
    quick = view("quick", running=9, prompt_tokens_per_second=500.0)
    assert chosen([slow, quick], [busy]).decode.ref.worker_id == "quick"
    failing = replace(quick, failing=True)
    assert chosen([slow, failing], [busy]).decode.ref.worker_id == "slow"


def test_no_decode_no_choice() -> None:
    assert decide([], [prefill("p")]) is None


def test_every_choice_says_why() -> None:
    alone = decide([view("d")], [])
    assert alone.note == "local: no_prefill_ready; decode only: 0 tokens cached, 1000 blocks free"
    assert (alone.decode_reason, alone.prefill_reason) == ("only", "no_prefill_ready")
    both = decide([view("d"), view("e", running=1)], [prefill("p"), prefill("q", cached_tokens=48)])
    assert both.note == (
        "prefill prefix: 48 tokens cached, backlog 0.00 s; "
        "decode least_loaded: 0 tokens cached, 1000 blocks free"
    )
    assert (both.decode_reason, both.prefill_reason) == (
        ChoiceReason.LEAST_LOADED,
        ChoiceReason.PREFIX,
    )
    full = decide([view("d", free_blocks=0), view("e", free_blocks=1)], [])
    assert full.decode_reason is ChoiceReason.NO_ROOM


def test_cached_tokens_make_up_for_sequences() -> None:
    holder = view("holder", cached_tokens=96)  # 50 tokens make up for one sequence
    assert decide([replace(holder, load=load(running=1)), view("b")], []).decode.ref == holder.ref
    assert decide([replace(holder, load=load(running=2)), view("b")], []).decode.ref != holder.ref
    # one that has others waiting is late: each of them counts twice
    assert decide([replace(holder, load=load(waiting=1)), view("b")], []).decode.ref != holder.ref
    # without room for the prompt, nothing makes up for it
    assert (
        decide([replace(holder, load=load(free_blocks=6)), view("b")], []).decode.ref != holder.ref
    )


def test_what_is_on_its_way_draws_a_request_but_does_not_make_it_local() -> None:
    coming = view("coming", expected_tokens=96)
    choice = decide([view("b"), coming], [prefill("p")])
    assert (choice.decode, choice.decode_reason) == (coming, ChoiceReason.PREFIX)
    assert choice.prefill is not None


@pytest.mark.parametrize(("cached", "local"), [(64, False), (68, True), (96, True)])
def test_a_short_part_that_is_not_cached_is_computed_on_decode(cached: int, local: bool) -> None:
    choice = decide([view("d", cached_tokens=cached)], [prefill("p", cached_tokens=96)])
    assert (choice.local_reason is LocalReason.PREFIX_CACHED) == local
    assert (choice.prefill is None) == local


@pytest.mark.parametrize(
    ("prompt", "cached", "on_prefill", "decode_backlog", "local"),
    [
        (10_200, 10_000, 0, 0, True),
        (100_200, 100_000, 0, 0, True),  # whatever the total
        (10_512, 10_000, 0, 0, True),
        (10_513, 10_000, 0, 0, False),  # the remainder is long
        (10_200, 10_000, 9_472, 0, False),  # prefill computes 728: no four times as many
        (600, 100, 0, 0, False),  # most of it has to be computed anyway
        (10_200, 10_000, 0, 313, False),  # decode has more to compute already
    ],
)
def test_decode_computes_the_short_remainder_of_what_it_has_cached(
    prompt: int, cached: int, on_prefill: int, decode_backlog: int, local: bool
) -> None:
    """A conversation that decode has would be computed anew on prefill."""
    need = Need(prompt_tokens=prompt, total_tokens=prompt + 100)
    decode = view("d", cached_tokens=cached, waiting_tokens=decode_backlog, capacity=200_000)
    there = prefill("p", cached_tokens=on_prefill, capacity=200_000)
    choice = choose(need, [decode], [there], config=CONFIG, rng=random.Random(0))
    assert (choice.local_reason is LocalReason.PREFIX_CACHED) == local
    work = work_tokens(prompt, [decode], [there], CONFIG)
    assert work == prompt - (cached if local else on_prefill)


def test_a_failing_worker_is_taken_only_if_there_is_no_other() -> None:
    bad, busy = view("bad", failing=True), view("busy", running=90)
    assert pick(bad, busy) == "busy"
    assert pick(bad) == "bad"
    broken, far = prefill("broken", failing=True), prefill("far", waiting_tokens=10**6)
    assert decide([view("d")], [broken, far]).prefill.ref == far.ref
    assert decide([view("d")], [broken]).local_reason is LocalReason.PREFILL_FAILING


def test_prefill_where_the_prompt_is_done_first() -> None:
    """Backlog and twice what is left of the prompt, in seconds on that worker; what another has
    cached can be taken from there for a tenth of computing it."""
    need = Need(prompt_tokens=1000, total_tokens=1001)
    holder = prefill("holder", cached_tokens=800, tokens_per_second=1000.0)
    idle = prefill("idle", tokens_per_second=1000.0)

    def chosen(waiting: int) -> str:
        busy = replace(holder, load=load(waiting_tokens=waiting, tokens_per_second=1000.0))
        return choose_prefill(need, [busy, idle], random.Random(0)).ref.worker_id

    assert chosen(150) == "holder"
    assert chosen(170) == "idle"
    coming = prefill("coming", expected_tokens=960, tokens_per_second=1000.0)
    assert choose_prefill(need, [holder, coming], random.Random(0)).ref.worker_id == "coming"
    # what is on its way is part of the backlog, and still better than computing it twice
    leader = replace(coming, unseen_tokens=1000)
    assert choose_prefill(need, [leader, idle], random.Random(0)).ref.worker_id == "coming"


def test_what_can_be_taken_from_decode_need_not_be_computed() -> None:
    need = Need(prompt_tokens=1000, total_tokens=1001)
    some = prefill("some", cached_tokens=400, waiting_tokens=500, tokens_per_second=1000.0)
    none = prefill("none", waiting_tokens=450, tokens_per_second=1000.0)
    holder = view("decode", cached_tokens=900)

    def chosen(*lenders: WorkerView) -> str:
        found = choose_prefill(need, [some, none], random.Random(0), lenders=lenders)
        return found.ref.worker_id

    assert chosen() == "some"  # 0.5 + 1.2 s instead of 0.45 + 1.28 s
    assert chosen(holder) == "some"  # 0.5 + 0.3 s instead of 0.45 + 0.38 s
    some = replace(some, load=load(waiting_tokens=600, tokens_per_second=1000.0))
    assert chosen() == "none"
    assert chosen(holder) == "none"
    some = replace(some, cached_tokens=0, expected_tokens=400)  # coming, and not to be lent yet
    assert chosen() == "some"
    assert chosen(holder) == "none"
    other = structs.replace(FINGERPRINT, dtype="float16")
    assert chosen(replace(holder, fingerprint=other)) == "some"


def test_kv_comes_from_the_worker_that_has_most_of_it() -> None:
    some, most = view("some", cached_tokens=200), view("most", cached_tokens=900)
    other = replace(most, fingerprint=structs.replace(FINGERPRINT, dtype="float16"))
    for role in Role:
        computes = view("computes", role, cached_tokens=100)
        assert choose_source(computes, [some, most, other, computes]) is most
        assert choose_source(computes, [some, other, computes]) is some
        assert choose_source(replace(computes, expected_tokens=150), [some]) is None
    assert choose_source(most, [some, most]) is None


class Sessions:
    """Conversations over decode workers whose caches hold a bounded number of them each."""

    def __init__(self, rng: random.Random, *, workers: int = 4, per_worker: int = 120) -> None:
        self.rng = rng
        self.caches: dict[str, list[int]] = {f"d{i}": [] for i in range(workers)}
        self.ends: dict[str, list[float]] = {name: [] for name in self.caches}
        self.per_worker = per_worker
        self.turns: Counter[int] = Counter()

    def view(self, name: str, session: int, need: Need, *, reports_cache: bool) -> WorkerView:
        held = need.prompt_tokens - 100 if reports_cache and session in self.caches[name] else 0
        return view(name, running=len(self.ends[name]), cached_tokens=held)

    def turn(self, now: float, session: int, *, reports_cache: bool) -> tuple[bool, list[int]]:
        """One turn somewhere; whether its worker held the session, and all loads."""
        need = Need(prompt_tokens=300 * (self.turns[session] + 1), total_tokens=4000)
        for name in self.ends:
            self.ends[name] = [end for end in self.ends[name] if end > now]
        views = [
            self.view(name, session, need, reports_cache=reports_cache) for name in self.caches
        ]
        name = choose_decode(need, views, self.rng, CONFIG).ref.worker_id
        cache = self.caches[name]
        hit = session in cache
        self.caches[name] = [*(s for s in cache if s != session), session][-self.per_worker :]
        self.ends[name].append(now + self.rng.uniform(0.5, 1.5))
        self.turns[session] += 1
        return hit, [len(ends) for ends in self.ends.values()]


@pytest.mark.parametrize(("reports_cache", "hits"), [(True, (0.85, 1.0)), (False, (0.0, 0.35))])
def test_simulated_sessions_stay_where_their_prefix_is(
    reports_cache: bool, hits: tuple[float, float]
) -> None:
    """400 conversations over 4 workers that hold 120 each: later turns find their prefix, and the
    loads stay as close as the weight says (at most 2400 tokens, which make up for 9 sequences)."""
    sessions = Sessions(random.Random(11))
    rng, now, found, gaps = sessions.rng, 0.0, [], []
    for _ in range(3000):
        now += rng.expovariate(32.0)
        session = rng.randrange(400)
        later = sessions.turns[session] > 0
        sessions.turns[session] %= 8  # after eight turns it begins anew
        hit, loads = sessions.turn(now, session, reports_cache=reports_cache)
        if later:
            found.append(hit)
        gaps.append(max(loads) - min(loads))
    assert hits[0] <= sum(found) / len(found) <= hits[1]
    assert max(gaps) <= 9 + 2


def test_a_prefix_that_all_share_does_not_draw_all_to_one_worker() -> None:
    """Every prompt begins with the same 1024 tokens, which at first one worker alone holds."""
    rng = random.Random(13)
    holders, ends, now = {"a"}, {name: [] for name in "abcd"}, 0.0
    need = Need(prompt_tokens=1100, total_tokens=1200)
    loads = []
    for _ in range(2000):
        now += rng.expovariate(40.0)
        for name in ends:
            ends[name] = [end for end in ends[name] if end > now]
        views = [
            view(name, running=len(ends[name]), cached_tokens=1024 * (name in holders))
            for name in ends
        ]
        name = choose_decode(need, views, rng, CONFIG).ref.worker_id
        holders.add(name)
        ends[name].append(now + rng.uniform(0.5, 1.5))
        loads.append([len(e) for e in ends.values()])
    assert holders == set("abcd")
    settled = loads[500:]
    assert max(max(each) - min(each) for each in settled) <= 5


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
        chosen = choose_decode(NEED, views, rng, CONFIG).ref.worker_id
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
        need = Need(prompt_tokens=tokens, total_tokens=tokens + 1)
        views = [
            prefill(name, waiting_tokens=int(backlog[name]), tokens_per_second=rates[name])
            for name in rates
        ]
        chosen = choose_prefill(need, views, rng).ref.worker_id
        backlog[chosen] += tokens
        given[chosen] += tokens
        for name in rates:
            backlog[name] = max(0.0, backlog[name] - rates[name] * 0.06)
    shares = [given[name] / sum(given.values()) for name in rates]
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05)
    waits = [backlog[name] / rates[name] for name in rates]
    assert max(waits) - min(waits) < 1.2
