"""The scaling policy against loads that change, on a virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.simulate.fleet import SHAPES, Machine, arrivals, compare, drawn_lengths


@pytest.mark.parametrize("shape", SHAPES)
def test_as_good_as_pools_that_always_have_all_workers(shape: str) -> None:
    """Pools of eight and eight could not be beaten by any foreknowledge of the load."""
    asks = arrivals(shape, drawn_lengths())
    found = compare(asks, machine=Machine(), max_replicas=8)
    assert found.best >= 0.99
    assert found.good >= 0.95 * found.best
    assert found.share_of_workers <= 0.65
    assert found.changes <= (2 if shape == "steady" else 24)
