"""Which decode workers give sequences to one that has just begun to decode."""

from __future__ import annotations

import pytest

from protocol.ids import Role, WorkerRef
from protocol.messages import WorkerLoad
from router.workers.balance import Newcomers, surplus
from router.workers.policy import WorkerView
from tests.support.blocks import FINGERPRINT
from tests.support.submits import LIMITS


def view(name: str, running: int) -> WorkerView:
    return WorkerView(
        ref=WorkerRef(worker_id=name, epoch=1, role=Role.DECODE, address="x:1"),
        load=WorkerLoad(running=running),
        capacity=100,
        layout=LIMITS.layout,
        fingerprint=FINGERPRINT,
    )


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ({"a": 30, "new": 0}, {"a": 8}),
        ({"a": 12, "new": 2}, {"a": 5}),
        ({"a": 8, "new": 0}, {"a": 4}),
        ({"a": 7, "new": 0}, {}),
        ({"a": 20, "new": 11}, {}),
        ({"a": 12, "b": 15, "new": 0}, {"a": 4, "b": 5}),
        ({"a": 12, "b": 15, "new": 0, "newer": 0}, {"a": 4, "b": 5}),
        ({"new": 3}, {}),
    ],
)
def test_full_workers_give_a_newcomer_its_share(running, expected):
    views = [view(name, count) for name, count in running.items()]
    assert surplus(views, {name for name in running if name.startswith("new")}) == expected
    assert surplus(views, set()) == {}


def test_giving_ends_when_the_newcomer_has_its_share():
    running = {"a": 40, "b": 33, "new": 0}
    for _ in range(20):
        for name, count in surplus([view(n, c) for n, c in running.items()], {"new"}).items():
            running[name] -= count
            running["new"] += count
    assert sum(running.values()) == 73
    assert running["new"] >= 15
    assert max(running.values()) < 2 * running["new"] + 8


def test_a_worker_is_new_for_a_while_and_those_seen_first_are_not():
    newcomers = Newcomers()
    assert newcomers.see(set(), 0.0) == set()
    assert newcomers.see({"a", "b"}, 1.0) == set()
    assert newcomers.see({"a", "b", "c"}, 2.0) == {"c"}
    assert newcomers.see({"a", "c"}, 10.0) == {"c"}
    assert newcomers.see({"a", "c"}, 18.0) == set()
    assert newcomers.see({"a", "b", "c"}, 19.0) == {"b"}  # back, and empty
    assert newcomers.see(set(), 20.0) == set()  # a router that has lost all
    assert newcomers.see({"a", "c"}, 21.0) == set()
