"""A worker that fails at once must not draw the traffic."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from protocol.ids import RequestKey
from router.workers.bookkeeping import BreakerState, CircuitBreaker


def key(number: int) -> RequestKey:
    return RequestKey(f"r{number}")


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for i in range(3):
        assert breaker.allows(now)
        breaker.failed(key(i), now)
    return breaker


def test_it_opens_after_three_failures_and_then_probes_with_one_request_at_a_time() -> None:
    breaker = opened()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.started(key(4))
    breaker.started(key(5))  # chosen at the same moment
    assert not breaker.allows(1.0)
    breaker.succeeded(key(5))  # or from before the pause: says nothing
    assert not breaker.allows(1.0)
    breaker.succeeded(key(4))
    assert breaker.state is BreakerState.CLOSED


def test_a_failure_from_before_the_pause_says_nothing_of_the_probe() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    breaker.started(key(4))
    breaker.failed(key(1), 1.1)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.began(key(4), 1.2)
    assert breaker.state is BreakerState.CLOSED


def test_each_failed_probe_doubles_the_pause() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for i in range(8):
        start = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - start)
        breaker.started(key(i))
        breaker.failed(key(i), now)
        breaker.ended(key(i))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_failures_after_the_first_token_double_the_pause_too() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for i in range(8):
        start = now
        while not breaker.allows(now):
            now += 0.7
        pauses.append(now - start)
        breaker.started(key(i))
        breaker.began(key(i), now)
        assert breaker.state is BreakerState.CLOSED
        now += 10.0
        breaker.failed(key(i), now)
        breaker.ended(key(i))
    assert pauses == pytest.approx([1.4, 2.1, 4.2, 8.4, 16.1, 30.1, 30.1, 30.1])
    while not breaker.allows(now):
        now += 0.5
    breaker.started(key(8))
    breaker.began(key(8), now)
    for i in range(8, 10):
        breaker.succeeded(key(i))
    for i in range(10, 13):
        assert breaker.allows(now)
        breaker.failed(key(i), now)
    assert breaker.allows(now + 1.0), "the first pause again"


def test_a_probe_without_an_outcome_makes_way_for_another() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    breaker.started(key(4))
    breaker.ended(key(4))  # cancelled
    assert breaker.allows(1.0)


def test_now_and_then_a_failure_opens_nothing() -> None:
    breaker = CircuitBreaker()
    for i in range(100):
        if i % 3 == 0:
            breaker.failed(key(i), float(i))
        else:
            breaker.succeeded(key(i))
    assert breaker.allows(100.0)
    breaker.failed(key(0), 100.0)
    breaker.failed(key(0), 101.0)
    breaker.failed(key(0), 140.0)  # the others are forgotten
    assert breaker.allows(140.0)


@pytest.mark.parametrize(("share", "max_failed"), [(1.0, 15), (0.6, 100)])
def test_a_worker_that_fails_at_once_gets_few_requests_until_it_is_mended(
    share: float, max_failed: int
) -> None:
    """Four workers, 40 requests a second of 2 s each; one fails `share` of its requests in no time,
    which makes it the least loaded at each moment."""
    rng, names = random.Random(1), "abcd"
    breakers = {name: CircuitBreaker() for name in names}
    ends: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    given: Counter[tuple[str, bool]] = Counter()
    failed = 0
    for i in range(12_000):
        now = i / 40
        for name in names:
            for end, number in ends[name]:
                if end <= now:
                    breakers[name].succeeded(key(number))
                    breakers[name].ended(key(number))
            ends[name] = [item for item in ends[name] if item[0] > now]
        mended = now >= 150.0
        usable = [name for name in names if breakers[name].allows(now)] or list(names)
        name = min(usable, key=lambda name: (len(ends[name]), rng.random()))
        breakers[name].started(key(i))
        given[name, mended] += 1
        if name == "a" and not mended and rng.random() < share:
            failed += 1
            breakers[name].failed(key(i), now)
            breakers[name].ended(key(i))
        else:
            ends[name].append((now + 2.0, i))
    assert failed <= max_failed
    assert given["a", True] > 1000, "a fourth of 6,000 but for the last pause"
