"""Contexts of different lengths are cut into splits of about equal length."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.kernels.triton.splits import (
    MERGE_ROOM,
    WAVE,
    cuts_by_length,
    max_splits,
    plan_splits,
)


def fields(table):
    """(row, number, splits of the row) of each split."""
    assert table.dtype == np.int32
    assert table[0] == len(table) - 1
    return [(code & 0xFFFF, code >> 16 & 0xFF, code >> 24) for code in table[1:].tolist()]


@given(
    st.lists(st.integers(0, 2100), min_size=1, max_size=300),
    st.sampled_from([1, 2, 8, 16]),
    st.integers(0, 600),
)
@example([0] * 300, 8, 0)
@example([2100] * 9, 8, 0)
@example([2100] + [1] * 9, 8, 60)
def test_each_context_is_in_the_table_once(tiles, kv_heads, more_room):
    room = len(tiles) + more_room
    splits = fields(plan_splits(np.array(tiles, np.int32), kv_heads, room))
    assert len(splits) <= room
    rows = [row for row, number, _ in splits if not number]
    assert sorted(rows) == list(range(len(tiles)))
    lengths = {row: tiles[row] / count for row, _, count in splits}
    assert [lengths[row] for row in rows] == sorted(lengths.values(), reverse=True)
    at = 0
    for row in rows:
        count = splits[at][2]
        assert splits[at : at + count] == [(row, number, count) for number in range(count)]
        assert 1 <= count <= max(1, min(MERGE_ROOM, tiles[row]))
        at += count
    assert at == len(splits)


@pytest.mark.parametrize("batch", [8, 16, 48, 70, 96, 256])
def test_no_split_is_much_longer_than_the_mean_program(batch):
    """One context of 6,700 tokens among short ones, as in reasoning with long prompts."""
    tiles = np.array([105, *[12] * (batch - 1)], np.int32)
    splits = fields(plan_splits(tiles, 8, max_splits(batch, 8)))
    longest = max(tiles[row] / count for row, _, count in splits)
    fair = int(tiles.sum()) * 8 / WAVE
    assert longest <= max(1.5 * fair, 105 / 8)


def test_contexts_of_one_length_have_as_many_splits_each():
    for batch, count in ((8, 8), (16, 4), (32, 2), (64, 1), (128, 1)):
        splits = fields(plan_splits(np.full(batch, 24, np.int32), 8, max_splits(batch, 8)))
        assert {count for _, _, count in splits} == {count}


def test_batches_of_few_programs_have_many_splits_each():
    assert [batch for batch in (1, 2, 4, 8, 16, 256) if cuts_by_length(batch, 8)] == [8, 16, 256]
    assert not cuts_by_length(16, 2)
