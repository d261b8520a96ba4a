"""Seeded random hand-offs: most succeed, every invariant is checked after every event."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.transfer_chaos import Chaos


@pytest.mark.parametrize("seed", range(8))
def test_without_faults_every_handoff_commits(seed):
    assert Chaos(seed, fault_rate=0.0).run(10) == {"committed": 10}


@pytest.mark.parametrize("seed", range(100, 115))
def test_under_faults_nothing_leaks_hangs_or_mixes(seed):
    outcomes = Chaos(seed, fault_rate=0.15).run(20)
    assert outcomes.total() <= 20


@pytest.mark.slow
def test_thousands_of_handoffs_under_faults():
    outcomes: Counter[str] = Counter()
    for seed in range(1000, 1260):
        outcomes += Chaos(seed, fault_rate=0.1).run(20)
    assert outcomes.total() >= 5000
    assert outcomes["committed"] > 2000
