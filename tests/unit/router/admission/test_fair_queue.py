"""Fair shares of tokens, under simulated load."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.fair_queue import FairQueue, QueueEntry


def take(queue: FairQueue[str]) -> QueueEntry[str]:
    entry = queue.next()
    assert entry is not None
    queue.take(entry)
    return entry


def drain(queue: FairQueue[str]) -> list[QueueEntry[str]]:
    return [take(queue) for _ in range(len(queue))]


def push(queue: FairQueue[str], flow: str, cost: int, weight: float = 1.0, priority: int = 0):
    return queue.push(flow, flow=flow, weight=weight, cost=cost, priority=priority)


def test_a_heavy_caller_does_not_starve_a_light_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        push(queue, "heavy", 1000)
    push(queue, "light", 50)
    assert [entry.flow for entry in drain(queue)[:2]] == ["heavy", "light"]


def test_shares_follow_weights() -> None:
    queue: FairQueue[str] = FairQueue()
    chance = random.Random(3)
    for _ in range(2000):
        push(queue, "a", chance.randint(1, 400), weight=1.0)
        push(queue, "b", chance.randint(1, 400), weight=3.0)
    served: Counter[str] = Counter()
    while sum(served.values()) < 200_000:
        entry = take(queue)
        served[entry.flow] += entry.cost
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.02)


def test_output_tokens_are_paid_for() -> None:
    """Two callers with equal prompts, one with answers ten times as long, for a long time."""
    queue: FairQueue[str] = FairQueue()
    served: Counter[str] = Counter()
    answers = {"short": 10, "long": 100}
    for flow in answers:
        for _ in range(3):
            push(queue, flow, 10)
    for _ in range(5000):
        flow = take(queue).flow
        queue.charge(flow, answers[flow], weight=1.0)
        served[flow] += 10 + answers[flow]
        push(queue, flow, 10)
    assert served["long"] / served["short"] == pytest.approx(1.0, rel=0.02)


def test_output_is_paid_for_by_weight_also_by_who_never_waited() -> None:
    """360 tokens at weight 4 are as many as 90 at weight 1."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(3):
        push(queue, "light", 50)
    queue.charge("heavy", 360, weight=4.0)
    push(queue, "heavy", 50, weight=4.0)
    assert [entry.flow for entry in drain(queue)] == ["light", "light", "heavy", "light"]


def test_idling_banks_nothing_and_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        push(queue, "old", 100)
    drain(queue)
    for flow in ("new", "old"):
        for _ in range(10):
            push(queue, flow, 100)
    first = Counter(take(queue).flow for _ in range(10))
    assert first == {"new": 5, "old": 5}


def test_priority_orders_the_requests_of_one_caller_only() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a0", flow="a", weight=1.0, cost=10, priority=5)
    queue.push("a1", flow="a", weight=1.0, cost=10, priority=-1)
    queue.push("b0", flow="b", weight=1.0, cost=10, priority=100)
    queue.push("a2", flow="a", weight=1.0, cost=10, priority=5)
    assert [entry.item for entry in drain(queue)] == ["a1", "b0", "a0", "a2"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_comes_and_goes_the_shares_stay_even_and_the_counts_exact(
    data: st.DataObject,
) -> None:
    """While two flows wait all the time, neither is ever ahead by more than its largest item."""
    queue: FairQueue[str] = FairQueue()
    waiting: list[QueueEntry[str]] = []
    served: Counter[str] = Counter()
    for _ in range(20):
        for flow in ("a", "b"):
            waiting.append(push(queue, flow, data.draw(st.integers(1, 100))))
    for _ in range(data.draw(st.integers(0, 15))):
        entry = take(queue)
        waiting.remove(entry)
        served[entry.flow] += entry.cost
        assert abs(served["a"] - served["b"]) <= 100
        if data.draw(st.booleans()):
            gone = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            queue.remove(gone)
            queue.remove(gone)
        assert len(queue) == len(waiting)
        assert queue.tokens == sum(entry.cost for entry in waiting)
    assert {id(e) for e in drain(queue)} == {id(e) for e in waiting}
    assert queue.next() is None
    assert queue.tokens == 0


@settings(max_examples=200, deadline=None)
@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=40),
    taken=st.integers(0, 20),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_what_is_ahead_is_told_to_within_an_item_of_each_flow(
    costs: list[tuple[str, int]], taken: int, weight: float
) -> None:
    queue: FairQueue[str] = FairQueue()
    for flow, cost in costs:
        push(queue, flow, cost)
    for _ in range(min(taken, len(queue))):
        take(queue)
    told, stored = queue.ahead("a", weight=weight, cost=100)
    late = push(queue, "a", 10, weight=weight)
    ahead = ahead_stored = 0
    while (entry := take(queue)) is not late:
        ahead += entry.cost
        ahead_stored += entry.num_tokens
    assert abs(told - ahead) <= 3 * 100
    assert abs(stored - ahead_stored) <= 3 * 300


def test_those_who_left_take_no_room_behind_one_who_stays() -> None:
    queue: FairQueue[str] = FairQueue()
    push(queue, "a", 1)
    for _ in range(1000):
        queue.remove(push(queue, "a", 1))
    assert (len(queue), queue.tokens, len(queue._flows["a"].heaps[1, 0])) == (1, 1, 1)
    waiting = [push(queue, "a", 1) for _ in range(100)]
    for entry in waiting[::2]:
        queue.remove(entry)
    assert [id(entry) for entry in drain(queue)[1:]] == [id(entry) for entry in waiting[1::2]]


def test_those_who_leave_change_nothing_in_the_order_of_the_others() -> None:
    chance = random.Random(1)
    for _ in range(20):
        queue: FairQueue[str] = FairQueue()
        entries = [push(queue, "a", 1) for _ in range(60)]
        assert [id(take(queue)) for _ in range(20)] == [id(entry) for entry in entries[:20]]
        for entry in (leaving := chance.sample(entries[21:], 25)):
            queue.remove(entry)
        stay = [entry for entry in entries[20:] if entry not in leaving]
        assert [id(entry) for entry in drain(queue)] == [id(entry) for entry in stay]


def test_an_entry_that_may_not_go_holds_back_its_own_size_only() -> None:
    queue: FairQueue[int] = FairQueue()
    costs = (("a", 5000), ("a", 4500), ("a", 40), ("b", 4600))
    entries = [queue.push(cost, flow=flow, weight=1.0, cost=cost) for flow, cost in costs]
    asked: list[int] = []

    def may_go(cost: int) -> bool:
        asked.append(cost)
        return cost < 100

    assert queue.next(may_go) is entries[2]
    assert asked == [5000, 40], "one of each size is asked about"
    assert queue.next(lambda _cost: False) is None
    assert queue.ahead("a", weight=1.0, cost=60)[0] == 40


def expected_next(queue: FairQueue[int], waiting: list[QueueEntry[int]], allowed: set[int]):
    """Of the first entry of each size in the order of flows and ages, the first that may go."""
    flows = queue._flows
    first: dict[tuple[int, int], QueueEntry[int]] = {}
    for entry in sorted(waiting, key=lambda e: (flows[e.flow].served, e.item)):
        first.setdefault(entry.size, entry)
    return next((entry for entry in first.values() if entry.item in allowed), None)


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_next_is_the_furthest_behind_of_those_that_may_go(chance: random.Random) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: list[QueueEntry[int]] = []
    for item in range(60):
        flow, tokens = f"f{chance.randrange(5)}", chance.randint(1, 300)
        waiting.append(
            queue.push(item, flow=flow, weight=1.0, cost=tokens, num_tokens=chance.randint(1, 300))
        )
        allowed = {entry.item for entry in waiting if chance.random() < 0.2}
        expected = expected_next(queue, waiting, allowed)
        entry = queue.next(allowed.__contains__)
        assert entry is expected
        if entry is not None:
            queue.take(entry)
            waiting.remove(entry)


def test_many_blocked_sizes_of_many_flows_cost_little() -> None:
    """The queue is asked at every report of a worker, on the event loop."""
    queue: FairQueue[int] = FairQueue()
    for item in range(10_000):
        tokens, cost = 2 ** (item % 18), 2 ** (item // 18 % 12)
        queue.push(item, flow=f"f{item % 1000}", weight=1.0, cost=cost, num_tokens=tokens)
    times = []
    for _ in range(3):
        start = time.thread_time()
        assert queue.next(lambda _item: False) is None
        times.append(time.thread_time() - start)
    assert min(times) < 0.15  # a look at each flow for each size takes seconds
