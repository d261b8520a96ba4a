"""What a worker's prefix cache holds, as a router keeps it: a set in few bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.kv_layout import split_hints
from router.workers import hint_set
from router.workers.hint_set import HintSet


def joined(hints: list[int]) -> bytes:
    return b"".join(hint.to_bytes(8, "little") for hint in hints)


HINTS = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
CHANGES = st.lists(st.tuples(st.lists(HINTS, max_size=40), st.lists(HINTS, max_size=40)))


@pytest.mark.parametrize("apart", [0, 8, 1000])
@given(changes=CHANGES)
def test_it_is_a_set_whatever_is_merged_when(
    apart: int, changes: list[tuple[list[int], list[int]]]
) -> None:
    before, hint_set._MIN_APART = hint_set._MIN_APART, apart
    try:
        held, expected = HintSet(), set()
        for removed, added in changes:
            held.change(removed=joined(removed), added=joined(added))
            expected.difference_update(removed)
            expected.update(added)
            for hint in {*removed, *added, 7, 2**63}:
                assert (hint in held) is (hint in expected)
            assert held.without_bits(3) == {hint for hint in expected if hint % 4 == 0}
        held.clear()
        assert not any(hint in held for hint in expected)
    finally:
        hint_set._MIN_APART = before


def test_a_million_tokens_take_less_than_a_megabyte_while_they_change() -> None:
    rng, held, present = random.Random(1), HintSet(), []
    told = rng.randbytes(8 * 62_500)
    present = list(split_hints(told))
    held.change(added=told)
    largest = held.num_bytes
    for _ in range(200):
        gone, present = present[:100], present[100:]
        new = rng.randbytes(800)
        present += split_hints(new)
        held.change(removed=joined(gone), added=new)
        largest = max(largest, held.num_bytes)
    assert largest < 1e6
    assert all(hint in held for hint in present)
    assert not any(hint in held for hint in gone)
