"""Slots of host memory, and the rule that chooses between loading and computing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_tiers.cost import Candidate, TierRate, cheapest, patience_s
from kv_tiers.slots import HostSlots
from protocol.errors import Internal
from tests.support.invariants import check_slots


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


def fill(slots: HostSlots, number: int) -> int:
    slot = slots.reserve(name(number))
    assert slot is not None
    slots.filled(slot, ok=True)
    slots.release([slot])
    return slot


def test_a_block_is_found_once_it_is_filled_and_until_it_is_evicted() -> None:
    slots = HostSlots(2)
    slot = slots.reserve(name(1))
    assert slot is not None
    assert slots.knows(name(1))
    assert not slots.holds(name(1))
    slots.filled(slot, ok=True)
    assert slots.holds(name(1))
    slots.release([slot])
    fill(slots, 2)
    slots.touch([name(1)])
    fill(slots, 3)
    assert [slots.holds(name(i)) for i in (1, 2, 3)] == [True, False, True]
    assert slots.num_evicted == 1


def test_what_is_kept_goes_after_all_others_until_its_time_and_is_at_most_half() -> None:
    slots = HostSlots(4)
    for number in range(4):
        fill(slots, number)
    slots.touch([name(0)], keep_until=100.0)
    slots.touch([name(1)], keep_until=50.0)

    def add(number: int, now: float) -> set[int]:
        slot = slots.reserve(name(number), now)
        assert slot is not None
        slots.filled(slot, ok=True)
        slots.release([slot])
        check_slots(slots)
        return {i for i in range(12) if slots.holds(name(i))}

    assert add(4, now=10.0) == {0, 1, 3, 4}
    assert add(5, now=10.0) == {0, 1, 4, 5}
    assert add(6, now=101.0) == {0, 4, 5, 6}  # both have expired; the longest unused goes first
    assert add(7, now=101.0) == {4, 5, 6, 7}
    slots.touch([name(4), name(5), name(6)], keep_until=500.0)  # 6 is the longest unused of them
    assert add(8, now=102.0) == {4, 5, 6, 8}
    assert add(9, now=102.0) == {4, 5, 8, 9}


def test_what_comes_and_goes_is_reported() -> None:
    slots = HostSlots(1)
    fill(slots, 1)
    assert slots.take_changes() == {name(1): True}
    fill(slots, 2)
    assert slots.take_changes() == {name(1): False, name(2): True}
    slots.forget([name(2)])
    assert slots.take_changes() == {name(2): False}


def test_a_leased_slot_is_neither_evicted_nor_reused() -> None:
    slots = HostSlots(2)
    fill(slots, 1)
    (held,) = slots.lease([name(1)])
    fill(slots, 2)
    fill(slots, 3)
    assert slots.holds(name(1))
    slots.forget([name(1)])
    assert not slots.knows(name(1))
    assert fill(slots, 4) != held
    slots.release([held])
    check_slots(slots)
    assert {fill(slots, 5), fill(slots, 6)} == {0, 1}


def test_a_copy_that_failed_leaves_no_name() -> None:
    slots = HostSlots(1)
    slot = slots.reserve(name(1))
    assert slot is not None
    assert slots.reserve(name(2)) is None
    slots.filled(slot, ok=False)
    assert not slots.knows(name(1))
    assert slots.reserve(name(2)) is None  # still leased
    slots.release([slot])
    assert slots.reserve(name(2)) == slot
    with pytest.raises(Internal):
        slots.reserve(name(2))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=80))
def test_accounts_add_up_whatever_happens(calls: list[tuple[int, int]]) -> None:
    slots = HostSlots(3)
    filling: dict[int, int] = {}  # slot -> name
    leased: list[int] = []
    reported: set[bytes] = set()
    for call, number in calls:
        own = name(number % 4)
        match call:
            case 0 | 1 if not slots.knows(own):
                if (slot := slots.reserve(own, now=number)) is not None:
                    filling[slot] = number
            case 2 if filling:
                slot, _ = filling.popitem()
                slots.filled(slot, ok=number > 3)
                slots.release([slot])
            case 3 if slots.holds(own):
                leased += slots.lease([own])
            case 4 if leased:
                slots.release([leased.pop()])
            case 5:
                slots.forget([own])
            case 6:
                slots.touch([own, name(1)], keep_until=number)
        check_slots(slots)
        for changed, here in slots.take_changes().items():
            (reported.add if here else reported.discard)(changed)
        assert reported == {each for each in map(name, range(4)) if slots.holds(each)}
        assert slots.num_leased == len({*filling, *leased})


def test_the_way_that_ends_first_is_taken() -> None:
    none, some, all_ = (
        Candidate(num_blocks=n, seconds=s) for n, s in ((0, 0.0), (32, 0.01), (64, 1.0))
    )

    def choose(tokens_per_second: float) -> int:
        def compute_s(num_blocks: int) -> float:
            return tokens_per_second and (1024 - num_blocks * 16) / tokens_per_second

        return cheapest([none, some, all_], compute_s).num_blocks

    assert choose(100.0) == 64  # 5.12 s saved for 0.99 s
    assert choose(1000.0) == 32
    assert choose(1e6) == 0
    assert choose(0.0) == 64  # not measured yet
    late = Candidate(num_blocks=64, seconds=math.inf)
    assert cheapest([none, late], lambda _: 0.0) is none


def test_a_load_may_take_four_times_what_it_should_and_never_less_than_a_tenth_of_a_second() -> (
    None
):
    assert [patience_s(load_s) for load_s in (0.0, 0.02, 0.05, 2.0)] == [0.1, 0.1, 0.2, 8.0]


def test_what_is_faster_than_assumed_stays_so_and_what_is_not_measured_may_be_unusable() -> None:
    rate = TierRate(1e9)
    rate.begin(1, 10**9, 0.0)
    rate.end(1, 0.1, 0.1, ok=True)
    assert rate.per_second(0.1) == rate.per_second(1e6) == pytest.approx(1e10)
    disk = TierRate(0.0)
    assert disk.load_s(1000, 0.0) == math.inf
    disk.probed(2e7, 0.0)
    assert disk.load_s(10**7, 1e6) == pytest.approx(0.5, rel=0.01)  # until it is measured again
    disk.probed(1e9, 1e6)
    assert disk.load_s(10**7, 1e6) == pytest.approx(0.01, rel=0.2)


def test_a_tier_that_is_slow_every_other_time_is_not_believed_to_be_fast() -> None:
    rate, now = TierRate(8e9), 0.0
    for number in range(20):
        seconds = 10**9 / (4e8 if number % 2 else 8e9)
        rate.begin(number, 10**9, now)
        now += seconds
        rate.end(number, seconds, now, ok=True)
    assert rate.measured < 2e9


def test_rates_are_measured_queued_bytes_count_and_a_copy_that_hangs_stops_all() -> None:
    rate = TierRate(1e9)
    assert rate.load_s(10**9, 0.0) == pytest.approx(1.0, rel=0.01)
    rate.begin(1, 10**8, 0.0)
    assert rate.load_s(10**8, 0.0) == pytest.approx(0.2, rel=0.01)
    rate.end(1, 2.5, 2.5, ok=True)  # 40 MB/s: it may have made a link
    assert rate.load_s(10**8, 2.5) == pytest.approx(0.1, rel=0.02)
    rate.begin(1, 10**8, 2.5)
    rate.end(1, 5.0, 5.0, ok=True)  # 20 MB/s, again so slow
    assert rate.load_s(10**8, 5.0) == pytest.approx(5.0, rel=0.01)
    assert rate.load_s(10**8, 35.0) == pytest.approx(2.5, rel=0.01)  # believed less with time
    assert rate.load_s(10**8, 1e6) == pytest.approx(0.1, rel=0.02)  # at most what is assumed
    rate.begin(2, 1000, 40.0)
    assert rate.load_s(1000, 40.1) < 1
    assert rate.load_s(1000, 41.0) == math.inf
    rate.end(2, 1.0, 41.0, ok=False)
    assert rate.load_s(1000, 41.0) < 1
