"""Resharding between any two layouts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kv_transfer.plan.reshard import (
    cells_per_piece,
    check_fingerprint,
    check_layout,
    reshard,
    travelling_dtype,
)
from protocol.errors import HandoffFailed
from protocol.kv_layout import FP8_KV
from tests.support.transfer import make_fingerprint, make_layout, split_heads


def covered(plan, dest_rank):
    return [head for s in plan if s.dest_rank == dest_rank for head in range(*s.heads)]


def assert_covers(source, dest):
    plan = reshard(source, dest)
    for rank, (first, last) in enumerate(dest):
        assert covered(plan, rank) == list(range(first, last))
    for s in plan:
        assert s.num_heads > 0
        offset = source[s.source_rank][0]
        assert (s.source_heads[0] + offset, s.source_heads[1] + offset) == s.heads
        assert s.source_heads[1] <= source[s.source_rank][1] - offset
        offset = dest[s.dest_rank][0]
        assert (s.dest_heads[0] + offset, s.dest_heads[1] + offset) == s.heads
    return plan


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("source_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dest_tp", [1, 2, 4, 8])
def test_every_pair_of_usual_degrees(num_heads, source_tp, dest_tp):
    if any(max(n, num_heads) % min(n, num_heads) for n in (source_tp, dest_tp)):
        pytest.skip("not a layout")
    plan = assert_covers(split_heads(num_heads, source_tp), split_heads(num_heads, dest_tp))
    pairs = [(s.source_rank, s.dest_rank) for s in plan]
    assert len(set(pairs)) == len(pairs)  # one message between two ranks
    assert len(pairs) <= max(source_tp, dest_tp) + min(source_tp, dest_tp)


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 3), (3, 1), (3, 3)])
def test_three_heads_over_three_ranks(source_tp, dest_tp):
    assert_covers(split_heads(3, source_tp), split_heads(3, dest_tp))


@st.composite
def layouts(draw):
    """Any ranges, overlapping or not, that hold every head."""
    num_heads = draw(st.integers(1, 12))

    def ranges():
        spans = draw(
            st.lists(
                st.tuples(st.integers(0, num_heads - 1), st.integers(1, num_heads)), max_size=8
            )
        )
        found = [(a, min(a + n, num_heads)) for a, n in spans]
        missing = set(range(num_heads)) - {h for a, b in found for h in range(a, b)}
        return tuple(found + [(h, h + 1) for h in sorted(missing)])

    return ranges(), ranges()


@given(layouts())
def test_any_layouts_are_covered_exactly_once(pair):
    source, dest = pair
    plan = assert_covers(source, dest)
    pairs = [(s.source_rank, s.dest_rank) for s in plan]
    assert len(set(pairs)) == len(pairs)


def test_replicas_share_the_work():
    plan = reshard(split_heads(1, 4), split_heads(1, 4))
    assert [(s.source_rank, s.dest_rank) for s in plan] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_head_that_no_source_holds_is_refused():
    with pytest.raises(HandoffFailed, match="head 1"):
        reshard(((0, 1),), ((0, 2),))


@pytest.mark.parametrize(
    "field",
    ["model", "weights", "num_layers", "num_kv_heads", "head_dim", "dtype", "rope"],
)
def test_fingerprints_that_differ_are_refused_by_name(field):
    mine = make_fingerprint(make_layout(1))
    value = "other" if isinstance(getattr(mine, field), str) else 99
    theirs = make_fingerprint(make_layout(1), **{field: value})
    with pytest.raises(HandoffFailed, match=field) as caught:
        check_fingerprint(mine, theirs)
    assert caught.value.param == field
    check_fingerprint(mine, mine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_dim", 16),
        ("block_size", 0),
        ("dtype", "bfloat16"),
    ],
)
def test_layouts_that_differ_are_refused_by_name(field, value):
    with pytest.raises(HandoffFailed) as caught:
        check_layout(make_layout(1), make_layout(1, **{field: value}))
    assert caught.value.param == field


def test_numbers_and_codes_meet_as_codes():
    layouts = [make_layout(1, dtype=dtype) for dtype in ("float32", "bfloat16", FP8_KV)]
    for one in layouts[:2]:
        for mine, theirs in ((one, layouts[2]), (layouts[2], one)):
            check_layout(mine, theirs)
            check_fingerprint(make_fingerprint(mine), make_fingerprint(theirs))
            assert travelling_dtype(mine, theirs) == FP8_KV
        assert travelling_dtype(one, one) == one.dtype
        assert cells_per_piece(one, 4, 1024, FP8_KV) == 2  # 2 layers x 4 heads x 2 x 8 dims


@pytest.mark.parametrize("rank_heads", [((0, 5),), ((0, 2), (3, 4)), ((2, 2), (0, 4)), ((-1, 4),)])
def test_impossible_rank_heads_are_refused(rank_heads):
    good = make_layout(1)
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    bad = type(good)(**{**fields, "rank_heads": rank_heads})
    with pytest.raises(HandoffFailed) as caught:
        check_layout(good, bad)
    assert caught.value.param == "rank_heads"


def test_a_piece_holds_at_least_one_cell():
    layout = make_layout(2)  # 2 layers x 4 heads x 2 x 8 dims x 4 bytes a token
    assert cells_per_piece(layout, 4, 1) == 1
    assert cells_per_piece(layout, 4, 2048) == 1
    assert cells_per_piece(layout, 4, 3 * 2048 + 1) == 3
    assert cells_per_piece(layout, 2, 3 * 2048 + 1) == 6
