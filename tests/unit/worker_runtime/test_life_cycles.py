"""The life cycles of requests: one table per kind of worker, kept by `move`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from decode_worker.lifecycle import ADMITTED, DECODE_TRANSITIONS, QUEUED, DecodeEntry
from engine.kv.tables import BlockTables
from prefill_worker.lifecycle import PREFILL_TRANSITIONS, PrefillEntry
from tests.support.invariants import check_sequence
from tests.support.submits import make_submit
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry, Transitions
from worker_runtime.scheduling.sequence import Sequence

KINDS: list[tuple[type[SchedulerEntry], Transitions]] = [
    (PrefillEntry, PREFILL_TRANSITIONS),
    (DecodeEntry, DECODE_TRANSITIONS),
]


@pytest.mark.parametrize(("kind", "table"), KINDS)
def test_every_move_is_in_the_table_or_refused(
    kind: type[SchedulerEntry], table: Transitions
) -> None:
    for state, target in product(table, RequestState):
        entry: Any = kind(Sequence.from_submit(make_submit(), 0.0), 0, state)
        if target in table[state]:
            entry.move(target)
            assert entry.state is target
        else:
            with pytest.raises(AssertionError, match=f"{state} -> {target}"):
                entry.move(target)
            assert entry.state is state


@pytest.mark.parametrize(("kind", "table"), KINDS)
def test_every_state_can_be_reached_and_left_for_good(
    kind: type[SchedulerEntry], table: Transitions
) -> None:
    first = {RequestState.AWAITING_GRANT, RequestState.WAITING} & table.keys()
    assert set(table) == first.union(*table.values())
    assert table[RequestState.GONE] == frozenset()
    assert table[RequestState.ENDING] == {RequestState.GONE}
    for state in table:
        reached = {state}
        while new := set().union(*(table[s] for s in reached)) - reached:
            reached |= new
        assert RequestState.GONE in reached
    assert kind.without_blocks < table.keys()


def test_a_queued_request_of_decode_holds_no_blocks_and_no_place() -> None:
    assert DecodeEntry.without_blocks > QUEUED
    assert not QUEUED & ADMITTED


def test_the_check_of_a_sequence_notices_every_relation_that_is_broken() -> None:
    def sequence(**changes: Any) -> Sequence:
        found = Sequence.from_submit(make_submit((1, 2, 3, 4, 5)), 0.0)
        tables = changes.pop("tables", [7, 8])
        found.tables = BlockTables(block_size=4)
        found.tables.ids = [tables]
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    check_sequence(sequence(), 4)
    check_sequence(sequence(num_computed=4, num_launched=5), 4)
    for changes in (
        {"num_computed": 3, "num_launched": 2},
        {"num_launched": 9},
        {"num_computed": 5, "num_launched": 9},
        {"num_launched": 5, "tables": [7]},
        {"num_computed": 4, "num_launched": 4, "tables": []},
        {"tables": [7, 7]},
        {"digests": [b"a", b"b"]},
    ):
        with pytest.raises(AssertionError):
            check_sequence(sequence(**changes), 4)
