"""Seeded random hand-offs: most succeed, every invariant is checked after every event."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from protocol.ids import RequestKey
from tests.support.transfer import make_layout
from tests.support.transfer_chaos import Chaos
from tests.support.transfer_sim import World


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_without_faults_every_handoff_commits(seed, one_sided):
    assert Chaos(seed, fault_rate=0.0, one_sided=one_sided).run(10) == {"committed": 10}


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("seed", range(100, 115))
def test_under_faults_nothing_leaks_hangs_or_mixes(seed, one_sided):
    outcomes = Chaos(seed, fault_rate=0.15, one_sided=one_sided).run(20)
    assert outcomes.total() <= 20


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("first", range(1000, 1260, 20))
def test_thousands_of_handoffs_under_faults(first, one_sided):
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + 20):
        outcomes += Chaos(seed, fault_rate=0.1, one_sided=one_sided).run(20)
    assert outcomes.total() >= 385
    assert outcomes["committed"] > 154


def test_pieces_that_were_lost_after_they_left_are_sent_again():
    """A link breaks because of another hand-off: hand-offs on it go on, from whatever is
    missing."""
    choose = random.Random(1).choice
    layout = make_layout(2, num_layers=1, num_kv_heads=2)
    world = World(layout, layout)
    key = RequestKey("r")
    ticket = world.ticket(key, 3)
    world.offer(key, ticket)
    world.expect(key, ticket)
    while not world.fabric.can_send():
        choose(world.events())()
    for wire in world.fabric.can_send():
        world.fabric.send(wire)
        world.fabric.snap(wire)
        world.loop.settle()
    while key not in world.prefill.outcomes:
        events = world.events()
        if events:
            choose(events)()
        else:
            world.turn_clock(1.0)
        world.check()
    assert world.prefill.outcomes[key] == world.decode.outcomes[key] == ["committed"]
    world.wind_up()
    world.close()
