"""The scaling policy over values and a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

import pytest

from cluster.scaling.needs import (
    DecodeNeed,
    PrefillNeed,
    RouterSample,
    WorkerSample,
    _granted,
)
from cluster.scaling.policy import (
    PoolDecision,
    PoolLimits,
    PoolSample,
    ScalingPolicy,
    victims,
)
from protocol.ids import Role
from protocol.messages import WorkerLoad

RATE = 1000.0


def worker(number: int, *, age_s: float = 100.0, **load: float) -> WorkerSample:
    return WorkerSample(worker_id=f"w{number}", age_s=age_s, load=WorkerLoad(**load))


def prefills(count: int, *, waiting_tokens: int = 0, **load: float) -> tuple[WorkerSample, ...]:
    each = waiting_tokens // count if count else 0
    return tuple(
        worker(i, tokens_per_second=RATE, waiting_tokens=each, **load) for i in range(count)
    )


def decodes(count: int, **load: float) -> tuple[WorkerSample, ...]:
    loads = {"total_blocks": 100, "decode_step_s": 0.010, **load}
    return tuple(worker(i, **loads) for i in range(count))


class Pools:
    """Pools whose sizes follow the decisions, `start_s` later."""

    def __init__(
        self,
        *,
        max_replicas: int = 8,
        gpus: float | None = None,
        keep_s: float = 60.0,
        min_replicas: int = 1,
        start_s: float = 20.0,
    ) -> None:
        limits = {
            role: PoolLimits(min_replicas=min_replicas, max_replicas=max_replicas, gpus=1.0)
            for role in Role
        }
        self.policy = ScalingPolicy(
            limits,
            prefill=PrefillNeed(1.0),
            decode=DecodeNeed(step_s=0.05, max_num_seqs=64, block_size=16),
            keep_s=keep_s,
            gpus=gpus,
        )
        self.gpus = gpus
        self.start_s = start_s
        self.now = 0.0
        self.wanted = dict.fromkeys(Role, 1)
        self.ready = dict.fromkeys(Role, 1)
        self.starting: list[tuple[float, Role]] = []
        self.pinned: set[Role] = set()
        self.changes: list[tuple[float, Role, int]] = []
        self.decisions: dict[Role, PoolDecision] = {}

    def run(
        self,
        seconds: float,
        *,
        arrived: float = 0.0,
        prefill: Callable[[int], tuple[WorkerSample, ...]] = prefills,
        decode: Callable[[int], tuple[WorkerSample, ...]] = decodes,
        routers: RouterSample | None = None,
    ) -> dict[Role, int]:
        """Tokens arrive at a constant rate; the sizes after so many seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for at, role in [s for s in self.starting if s[0] <= self.now]:
                self.starting.remove((at, role))
                self.ready[role] += 1
            samples = {
                role: PoolSample(
                    wanted=self.wanted[role],
                    ready=(prefill if role is Role.PREFILL else decode)(self.ready[role]),
                    pinned=role in self.pinned,
                )
                for role in Role
            }
            sample = routers or RouterSample(arrived_tokens=round(arrived))
            self.decisions = self.policy.decide(samples, sample, self.now)
            for role, decision in self.decisions.items():
                change = decision.replicas - self.wanted[role]
                if change:
                    self.changes.append((self.now, role, decision.replicas))
                self.wanted[role] = decision.replicas
                self.starting += [(self.now + self.start_s, role)] * max(0, change)
                self.ready[role] = min(self.ready[role], decision.replicas)
            self.check(samples)
        return self.wanted

    def check(self, before: Mapping[Role, PoolSample]) -> None:
        """Sizes are within bounds and budget, and those that an operator set are left alone."""
        for role, size in self.wanted.items():
            limits = self.policy.limits[role]
            pinned = before[role].pinned
            assert pinned or limits.min_replicas <= size <= limits.max_replicas
            assert not pinned or size == before[role].wanted
        held = (max(size, before[role].wanted) for role, size in self.wanted.items())
        assert sum(held) <= (self.gpus or math.inf)  # what leaves has its GPUs until it has gone


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_sizes_stay_within_bounds_and_budget(seed: int) -> None:
    random = Random(seed)
    pools = Pools(
        max_replicas=random.randint(2, 6),
        gpus=random.choice([3, 5, 8]),
        start_s=random.choice([1.0, 20.0]),
        keep_s=random.choice([10.0, 60.0]),
    )
    for _ in range(30):
        pools.pinned = set(random.sample(list(Role), random.choice([0, 0, 0, 1])))
        load = {"held_blocks": random.choice([0, 60, 99]), "waiting": random.choice([0, 9])}
        pools.run(
            random.randint(1, 90),
            arrived=random.choice([0.0, 500.0, 3000.0, 9000.0]),
            decode=partial(decodes, **load),
        )


def test_prefill_follows_the_tokens_that_arrive() -> None:
    pools = Pools()
    assert pools.run(60, arrived=2000.0)[Role.PREFILL] == 3  # at most 80 % busy
    assert pools.run(60, arrived=500.0)[Role.PREFILL] == 3  # kept: a start took 20 s
    assert pools.run(150, arrived=500.0)[Role.PREFILL] == 1
    assert pools.wanted[Role.DECODE] == 1


def test_prompts_that_wait_longer_than_promised_are_caught_up_with() -> None:
    pools = Pools()
    pools.run(20, arrived=700.0)
    assert pools.wanted[Role.PREFILL] == 1

    def late(count: int) -> tuple[WorkerSample, ...]:
        return prefills(count, waiting_tokens=20_000)

    pools.run(10, arrived=700.0, prefill=late)
    assert pools.wanted[Role.PREFILL] == 3  # 700 / 0.8 arrive, 19,000 are to be gone in 10 s
    assert "prompts wait 20.0 s, 1 are promised" in pools.decisions[Role.PREFILL].reason


def test_tokens_in_the_routers_count_as_waiting() -> None:
    pools = Pools()
    waiting = RouterSample(waiting_tokens=20_000, arrived_tokens=100)
    assert pools.run(10, routers=waiting)[Role.PREFILL] == 3


def test_steady_load_slightly_above_one_worker_changes_once() -> None:
    pools = Pools()
    pools.run(1200, arrived=900.0)
    assert [(role, size) for _, role, size in pools.changes] == [(Role.PREFILL, 2)]


def test_no_load_returns_both_pools_to_their_minimum_even_to_none() -> None:
    pools = Pools(min_replicas=0)
    pools.run(60, arrived=5000.0, decode=lambda n: decodes(n, running=8, held_blocks=80))
    assert pools.wanted[Role.PREFILL] == 7
    assert pools.run(300, arrived=0.0) == {Role.PREFILL: 0, Role.DECODE: 0}


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ({"held_blocks": 90, "running": 3}, "KV blocks are 90 % in use"),
        ({"queued_blocks": 60, "held_blocks": 30}, "prompts wait for"),
        ({"running": 60}, "a worker runs 64"),
        ({"running": 9, "decode_step_s": 0.049}, "decode steps take 49.0 ms of 50"),
    ],
)
def test_decode_follows_blocks_places_and_step_times(load: dict[str, float], reason: str) -> None:
    pools = Pools()
    pools.run(20)
    assert pools.wanted == {Role.PREFILL: 1, Role.DECODE: 1}
    pools.run(10, decode=lambda n: decodes(n, **load) if n == 1 else decodes(n))
    assert pools.wanted[Role.DECODE] == 2
    assert reason in pools.decisions[Role.DECODE].reason


def test_prompts_without_blocks_are_decodes_need() -> None:
    pools = Pools()
    pools.run(20, arrived=100.0)

    def blocked(count: int) -> tuple[WorkerSample, ...]:
        return prefills(count, waiting_tokens=20_000, waiting=4)

    def full(count: int) -> tuple[WorkerSample, ...]:
        return decodes(count, waiting=4, queued_blocks=150, held_blocks=90)

    sample = RouterSample(blocked_tokens=1600, arrived_tokens=100)
    pools.run(5, prefill=blocked, decode=full, routers=sample)
    assert pools.wanted == {Role.PREFILL: 1, Role.DECODE: 4}  # (90 + 150 + 100) / 85


@pytest.mark.parametrize(("waiting", "tokens"), [(0, 20_000), (1, 15_000), (4, 0), (9, 0)])
def test_only_prompts_that_have_blocks_wait_for_prefill(waiting: int, tokens: int) -> None:
    prefill = prefills(1, waiting_tokens=20_000, waiting=4)
    decode = decodes(1, waiting=waiting, queued_blocks=150 if waiting else 0)
    assert _granted(prefill, decode) == tokens


def test_refusals_for_pace_are_decodes_need() -> None:
    pools = Pools()
    pools.run(20)
    pools.run(5, routers=RouterSample(refused_for_pace=2))
    assert pools.wanted[Role.DECODE] == 2


def test_figures_of_a_cold_start_do_not_count() -> None:
    def cold(count: int) -> tuple[WorkerSample, ...]:
        return (
            worker(0, tokens_per_second=RATE),
            *(worker(i, age_s=1.0, tokens_per_second=9e9) for i in range(1, count)),
        )

    pools = Pools()
    assert pools.run(40, arrived=3000.0, prefill=cold)[Role.PREFILL] == 4
    slow = [worker(0, age_s=1.0, decode_step_s=9.0, running=1)]
    need = DecodeNeed(step_s=0.05, max_num_seqs=64, block_size=16).take(slow, RouterSample())
    assert need.workers == pytest.approx(1 / 64 / 0.85)


def test_overloaded_prefill_announces_decodes_load() -> None:
    pools = Pools()
    pools.run(20, arrived=100.0, decode=lambda n: decodes(n, held_blocks=50))

    def late(count: int) -> tuple[WorkerSample, ...]:
        return prefills(count, waiting_tokens=5000)

    pools.run(10, arrived=4000.0, prefill=late, decode=lambda n: decodes(n, held_blocks=50))
    assert pools.wanted[Role.DECODE] == 3
    decode_launch = next(at for at, role, _ in pools.changes if role is Role.DECODE)
    assert decode_launch < 20 + pools.start_s  # before prefill has grown


def test_bounds_and_pins_hold() -> None:
    pools = Pools(max_replicas=2)
    pools.run(60, arrived=5000.0)
    assert pools.wanted[Role.PREFILL] == 2
    assert "max_replicas is 2" in pools.decisions[Role.PREFILL].reason
    pools = Pools()
    pools.pinned = {Role.PREFILL}
    assert pools.run(600, arrived=5000.0)[Role.PREFILL] == 1
    assert pools.decisions[Role.PREFILL].need > 6


def test_the_budget_holds_and_the_more_strained_pool_takes_from_the_other() -> None:
    pools = Pools(gpus=4)
    pools.run(60, arrived=2000.0)
    assert pools.wanted == {Role.PREFILL: 3, Role.DECODE: 1}
    # Decode needs three; prefill, which has nothing to do any more, gives one after the other.
    pools.run(60, arrived=0.0, decode=lambda n: decodes(n, held_blocks=250 // n))
    assert pools.wanted == {Role.PREFILL: 1, Role.DECODE: 3}
    assert max(sum(sizes) for sizes in _sizes(pools)) == 4


def test_pools_that_are_both_strained_do_not_trade_for_ever() -> None:
    pools = Pools(gpus=4)
    pools.run(900, arrived=3000.0, decode=lambda n: decodes(n, held_blocks=340 // n))
    assert sum(pools.wanted.values()) == 4
    assert len(pools.changes) <= 6
    assert "no more within the budget of 4 GPUs" in " ".join(
        decision.reason for decision in pools.decisions.values()
    )


def _sizes(pools: Pools) -> list[tuple[int, int]]:
    sizes, seen = dict.fromkeys(Role, 1), []
    for _, role, size in pools.changes:
        sizes[role] = size
        seen.append((sizes[Role.PREFILL], sizes[Role.DECODE]))
    return seen


def test_a_worker_that_takes_long_to_start_is_kept_longer() -> None:
    changes = []
    for start_s in (1.0, 30.0):
        pools = Pools(start_s=start_s)
        pools.run(60, arrived=1500.0)
        before = pools.now
        pools.run(600, arrived=0.0)
        changes.append(next(at for at, _, size in pools.changes if size == 1) - before)
    assert 60 <= changes[0] <= 90
    assert 290 <= changes[1] <= 330  # a start is seen to take 29 of its 30 s


def test_a_policy_that_has_just_begun_knows_of_no_worker_that_is_not_needed() -> None:
    """It may be that of a directory that was replaced in a quiet moment."""
    pools = Pools(keep_s=60.0)
    pools.wanted, pools.ready = dict.fromkeys(Role, 4), dict.fromkeys(Role, 4)
    pools.run(60, arrived=0.0)
    assert pools.wanted == dict.fromkeys(Role, 4)
    pools.run(2, arrived=0.0)
    assert pools.wanted == dict.fromkeys(Role, 1)


def test_the_worker_that_goes_has_the_least_in_its_cache() -> None:
    workers = [
        worker(0, cached_blocks=5),
        worker(1, cached_blocks=2, running=7),
        worker(2, cached_blocks=2, running=1),
    ]
    assert [w.worker_id for w in victims(workers, 2)] == ["w2", "w1"]
    assert victims(workers, -1) == []
