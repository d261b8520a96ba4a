"""Both schedulers, prefix caches included, with the hand-off between them, under every fault."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.worker_world import WorkerWorld
from worker_runtime.scheduling.messages import MOVED

LENT = "kv_tier_hit_tokens_total{tier=peer}"


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_without_faults_requests_finish(seed, one_sided):
    world = WorkerWorld(seed, fault_rate=0.0, one_sided=one_sided)
    assert world.run(12) == {"finished": 12}


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("seed", range(100, 115))
def test_under_faults_tokens_are_right_and_nothing_is_left(seed, one_sided):
    ends = WorkerWorld(seed, fault_rate=0.08, one_sided=one_sided).run(12)
    assert ends.total() == 12


def test_under_few_faults_sequences_move_and_workers_lend():
    moved = lent = given_back = 0
    for seed in range(204, 212):
        world = WorkerWorld(seed, fault_rate=0.02, back_rate=0.05, one_sided=seed % 2 == 1)
        assert world.run(12).total() == 12
        moved += sum(worker.decode.counters()[MOVED] for worker in world.workers)
        given_back += world.num_given_back
        lent += sum(worker.peers.counters.read().get(LENT, 0) for worker in world.workers)
    assert moved >= 4
    assert lent > 0
    assert given_back > 0


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("first", range(1000, 1080, 40))
def test_hundreds_of_requests_under_faults(first, one_sided):
    ends: Counter[str] = Counter()
    for seed in range(first, first + 20):
        ends += WorkerWorld(seed, fault_rate=0.08, one_sided=one_sided).run(12)
    assert ends["finished"] > 120
