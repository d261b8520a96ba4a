"""The production schedulers and policy on a virtual clock, on devices whose step time is known."""

from __future__ import annotations

import operator
import random
from dataclasses import replace

import pytest

from benchmarks.simulate.__main__ import figures, slo_of, within
from benchmarks.simulate.devices import H200_8B
from benchmarks.simulate.prefixes import PrefixWorld, Tiers, agents
from benchmarks.simulate.turning import SMALL, Following
from benchmarks.simulate.worker import COMMIT_S, Delays
from benchmarks.simulate.world import Request, Setup, World
from cluster.bench.workload import Ask, fit_trace, read_trace
from protocol.ids import Role
from router.config import RouterConfig
from tests.support.sources import ROOT
from worker_runtime.config import WorkerConfig

TRACE = ROOT.parent / "shared" / "traces" / "azure2023_conv.csv"
TARGET_S = 0.0125


def setup(*, target_s: float = TARGET_S, gain_s: float = 0.03, **changes: int) -> Setup:
    return Setup(
        step_time=H200_8B,
        prefill=WorkerConfig(max_num_seqs=64, max_num_batched_tokens=8192, fill_tokens=2048),
        decode=WorkerConfig(max_num_seqs=256, max_num_batched_tokens=2048, target_step_s=target_s),
        router=RouterConfig(model_path="m", local_gain_s=gain_s),
        **changes,
    )


def good(requests: list[Request], slo: str) -> int:
    return sum(within(figures(request), slo_of(slo)) for request in requests)


def random_asks(count: int, rate: float) -> list[Ask]:
    source, now, asks = random.Random(5), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        asks.append(
            Ask(
                at=now, prompt_tokens=source.randint(16, 4000), output_tokens=source.randint(1, 300)
            )
        )
    return asks


@pytest.mark.parametrize("pools", [(1, 1), (2, 1), (1, 2), (0, 2)])
def test_every_request_gets_all_its_tokens_and_gives_its_blocks_back(pools):
    world = World(setup(num_prefill=pools[0], num_decode=pools[1]), random_asks(80, 15.0))
    requests = world.run()
    assert [len(request.times) for request in requests] == [r.ask.output_tokens for r in requests]
    for worker in world.workers:
        assert (worker.load.running, worker.load.waiting, worker.load.held_blocks) == (0, 0, 0)
        assert (worker.reservations.sequences, worker.reservations.tokens) == (0, 0)


@pytest.mark.parametrize("target_s", [0.008, TARGET_S, 0.02])
def test_chunks_keep_steps_near_their_target(target_s):
    """Two decode workers and no prefill: every prompt is computed beside streams."""
    world = World(setup(num_prefill=0, num_decode=2, target_s=target_s), random_asks(80, 10.0))
    requests = world.run()
    gaps = sorted(gap for r in requests for gap in map(operator.sub, r.times[1:], r.times))
    assert gaps[99 * len(gaps) // 100] == pytest.approx(target_s, rel=0.15)
    # Where little is measured yet a step may take longer, but not by much.
    assert gaps[-1] <= 1.6 * target_s


def test_delays_are_part_of_first_and_second_tokens():
    """One request on idle workers: a message to it, and one from it to the client."""
    (ask,) = [Ask(at=0.0, prompt_tokens=1000, output_tokens=2)]
    plain, late = Delays(), Delays(place_s=0.05, place_token_s=1e-5, commit_s=0.03)
    times = [World(setup(delays=delays), [ask]).run()[0].times for delays in (plain, late)]
    (first, second), (late_first, late_second) = times
    assert late_first - first == pytest.approx(0.05 + 1000 * 1e-5)
    assert late_second - late_first - (second - first) == pytest.approx(0.03 - COMMIT_S)


def longest_gap(request: Request) -> float:
    """Without the one between tokens 1 and 2: it has the hand-off in it, which chunks of prompts
    hardly shorten."""
    times = request.times[1:]
    return max(map(operator.sub, times[1:], times), default=0.0)


@pytest.mark.parametrize("pools", [(0, 2), (1, 1)])
def test_a_strict_tier_keeps_its_gap_beside_a_loose_one(pools):
    """Every fourth stream is promised gaps of 10 ms, where steps take 12.5 ms otherwise."""
    asks, gap_s = random_asks(120, 12.0), 0.010
    gaps_s = [None if number % 4 else gap_s for number in range(len(asks))]
    pools_of = {"num_prefill": pools[0], "num_decode": pools[1]}
    unpromised = World(setup(**pools_of), asks).run()[::4]
    promised = World(setup(**pools_of), asks, gaps_s).run()
    kept = [sum(longest_gap(r) <= gap_s for r in rs) for rs in (unpromised, promised[::4])]
    assert kept[1] >= 29
    assert kept[0] <= kept[1] - 5
    loose = [request for number, request in enumerate(promised) if number % 4]
    assert good(loose, "500/20/25") >= 85


@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")
def test_prompts_that_prefill_would_reach_late_are_served_sooner_from_decode():
    """Azure's conversation trace at twice its rate, where one prefill worker is full at times."""
    asks = fit_trace(
        read_trace(TRACE)[10_585:], limit=300, speed=2.0, max_prompt=6000, max_output=1 << 20
    )
    split = World(setup(gain_s=0.0), asks).run()
    shared = World(setup(), asks).run()
    assert not any(request.local for request in split)
    for slo in ("200/20", "200/20/20", "200/10"):
        assert good(shared, slo) >= 295
        assert 300 - good(shared, slo) <= (300 - good(split, slo)) / 4


def test_roles_that_follow_a_load_that_turns_beat_every_split():
    turn = replace(SMALL, phase_s=30.0, before=(20.0, 800, 8))
    asks = turn.asks()
    static = [sum(turn.good(World(turn.setup(count), asks))) for count in (1, 2, 3)]
    following = Following(turn)
    before, after = turn.good(World(turn.setup(2), asks, on_second=following))
    assert before + after >= 1.3 * max(static)
    assert [change.role for _, change in following.changes] == [
        Role.PREFILL,
        Role.DECODE,
        Role.DECODE,
    ]


def test_sequences_move_without_a_long_gap_and_lose_nothing():
    """Whatever role a worker gets when: every token comes once, and no block is left behind."""
    source = random.Random(3)

    def turn_at_random(world: World, _: int) -> None:
        worker = source.choice(world.workers)
        if len(world.of(Role.DECODE)) > 1 or worker.role is Role.PREFILL:
            world.change_role(
                worker.ref.worker_id,
                Role.PREFILL if worker.role is Role.DECODE else Role.DECODE,
            )

    asks = random_asks(150, 15.0)
    world = World(setup(num_prefill=1, num_decode=2), asks, on_second=turn_at_random)
    requests = world.run()
    assert [len(request.times) for request in requests] == [r.ask.output_tokens for r in requests]
    for worker in world.workers:
        load = worker.load_now()
        assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)
    gaps = [figures(request)[2] for request in requests]
    assert sum(gap <= 0.1 for gap in gaps) >= 0.95 * len(gaps)


def test_what_pools_lose_comes_back_from_host_memory_and_from_decode() -> None:
    asks, prompts = agents(3, random.Random(2))
    cached = []
    for tiers in (Tiers(), Tiers(host_bytes=8 << 30, peers=True)):
        world = PrefixWorld(setup(num_blocks=1500), asks, prompts, tiers)
        requests = world.run()
        assert all(len(r.times) == r.ask.output_tokens for r in requests)
        cached.append(world.num_cached)
    assert cached[0] < cached[1]
