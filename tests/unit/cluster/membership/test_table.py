"""The replica table: joining, leaving, replacement, expiry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cluster.membership.table import (
    Pool,
    Replica,
    ReplicaTable,
    RestartGrace,
    View,
    cluster_protocol,
    reachable,
)
from protocol.ids import Role
from protocol.states import WorkerState
from rpc.methods import protocol_digest

READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


def replica(
    name: str = "d1",
    epoch: int = 1,
    pool: Pool = Pool.DECODE,
    state: WorkerState = READY,
) -> Replica:
    return Replica(name=name, epoch=epoch, pool=pool, state=state, address=f"host:{epoch}")


def table() -> ReplicaTable:
    return ReplicaTable(incarnation=7, expiry_s=5.0)


def names(view: View) -> list[str]:
    return [m.name for m in view.replicas]


def test_report_adds_once() -> None:
    t = table()
    assert t.report(replica(), 0.0)
    version = t.view().version
    assert not t.report(replica(), 1.0)
    assert t.view().version == version
    assert t.view().replicas == (replica(),)
    assert t.view().incarnation == 7


def test_a_worker_is_addressed_with_the_process_that_it_reports() -> None:
    worker = structs.replace(replica(), process="host|pid:[1]|7|100")
    assert (worker.ref().address, worker.ref().process) == ("host:1", "host|pid:[1]|7|100")


class Later(Replica):
    """A replica that says more than those of this version."""

    zone: str = ""


def test_replicas_of_other_fields_are_of_another_protocol() -> None:
    assert replica().protocol == cluster_protocol() != protocol_digest()
    assert protocol_digest(Replica) != protocol_digest(Later) != protocol_digest()


def test_ready_workers_leaves_out_routers_and_the_draining() -> None:
    t = table()
    t.report(replica("d1"), 0.0)
    t.report(replica("d2", state=DRAINING), 0.0)
    t.report(replica("p1", pool=Pool.PREFILL), 0.0)
    t.report(replica("r1", pool=Pool.ROUTER), 0.0)
    refs = t.view().ready_workers()
    assert [(ref.worker_id, ref.role) for ref in refs] == [
        ("p1", Role.PREFILL),
        ("d1", Role.DECODE),
    ]
    assert refs[0].address == "host:1"


def test_state_moves_forward_only() -> None:
    t = table()
    t.report(replica(state=READY), 0.0)
    assert t.report(replica(state=DRAINING), 0.0)
    assert not t.report(replica(state=READY), 0.0)
    assert t.view().replicas[0].state is DRAINING


def test_leave_is_final_for_the_epoch() -> None:
    t = table()
    t.report(replica(), 0.0)
    assert t.leave("d1", 1)
    assert not t.leave("d1", 1)
    assert not t.report(replica(), 0.1)
    assert t.view().replicas == ()
    assert t.report(replica(epoch=2), 0.2)


def test_leave_of_an_older_epoch_changes_nothing() -> None:
    t = table()
    t.report(replica(epoch=2), 0.0)
    assert not t.leave("d1", 1)
    assert names(t.view()) == ["d1"]


def test_leaving_before_the_first_report_counts() -> None:
    t = table()
    assert not t.leave("d1", 1)
    assert not t.report(replica(), 0.0)


def test_newer_incarnation_replaces_and_the_older_stays_out() -> None:
    t = table()
    t.report(replica(epoch=1), 0.0)
    assert t.report(replica(epoch=2), 1.0)
    assert not t.report(replica(epoch=1), 2.0)
    assert [m.epoch for m in t.view().replicas] == [2]


def test_a_report_brings_an_expired_replica_back() -> None:
    t = table()
    t.report(replica("a"), 0.0)
    t.report(replica("b"), 3.0)
    assert t.next_expiry(3.0) == 2.0
    assert t.expire(4.9) == ()
    assert [m.name for m in t.expire(5.0)] == ["a"]
    assert names(t.view()) == ["b"]
    assert t.report(replica("a"), 6.0)
    assert names(t.view()) == ["a", "b"]


def test_most_replicas_do_not_expire_at_once() -> None:
    """Six seconds without a report of 60 in 100 mean a network fault, not 60 dead replicas."""
    t = table()
    for i in range(100):
        t.report(replica(f"d{i}"), 0.0)
    for i in range(60, 100):
        t.report(replica(f"d{i}"), 4.0)
    assert t.expire(6.0) == ()
    assert t.next_expiry(6.0) == 3.0, "of those that may still report in time"
    assert t.expire(49.0) == ()
    for i in range(55):
        t.report(replica(f"d{i}"), 49.0)
    assert len(t.expire(49.0)) == 45, "the rest is a minority again"
    for i in range(55):
        t.report(replica(f"d{i}", state=DRAINING), 50.0)
    assert len(t.view().replicas) == 55


def test_most_replicas_expire_after_ten_times_as_long() -> None:
    t = table()
    for i in range(4):
        t.report(replica(f"d{i}"), 0.0)
    assert t.expire(49.9) == ()
    assert len(t.expire(50.0)) == 4


def test_two_of_three_are_too_few_for_a_mass() -> None:
    t = table()
    for i in range(3):
        t.report(replica(f"d{i}"), 0.0)
    t.report(replica("d2"), 4.0)
    assert len(t.expire(5.0)) == 2


def test_next_expiry_of_an_empty_table_is_a_whole_period() -> None:
    assert table().next_expiry(100.0) == 5.0


reports = st.tuples(
    st.sampled_from(["report", "leave", "expire"]),
    st.sampled_from(["a", "b"]),
    st.integers(1, 3),
    st.sampled_from([READY, DRAINING]),
    st.floats(0.0, 3.0),
)


@given(st.lists(reports, max_size=40))
def test_the_version_changes_exactly_with_the_view(steps: list) -> None:
    t, now = table(), 0.0
    gone: set[tuple[str, int]] = set()
    for what, name, epoch, state, pause in steps:
        before = t.view()
        now += pause
        if what == "report":
            t.report(replica(name, epoch, state=state), now)
        elif what == "leave":
            t.leave(name, epoch)
            gone.add((name, epoch))
        else:
            t.expire(now)
        after = t.view()
        assert (after.replicas != before.replicas) == (after.version != before.version)
        assert after.version >= before.version
        assert not gone & {(m.name, m.epoch) for m in after.replicas}
        assert len({m.name for m in after.replicas}) == len(after.replicas)


# --- views across restarts of the directory -------------------------------------------------------


def view(incarnation: int, *replicas: Replica) -> View:
    return View(incarnation=incarnation, version=1, replicas=replicas)


def ready(view: View) -> list[str]:
    return [ref.worker_id for ref in view.ready_workers()]


def test_views_of_one_incarnation_are_taken_as_they_are() -> None:
    grace = RestartGrace(grace_s=6.0)
    for now, names in enumerate((["a", "b"], ["b"], [])):
        given = view(1, *map(replica, names))
        assert grace.complete(given, now) == given


def test_restarted_directory_keeps_the_known_replicas_for_a_while() -> None:
    grace = RestartGrace(grace_s=6.0)
    grace.complete(view(1, replica("a"), replica("b"), replica("c")), 0.0)
    assert ready(grace.complete(view(2), 10.0)) == ["a", "b", "c"]
    draining = structs.replace(replica("b"), state=DRAINING)
    known = view(2, replica("a", epoch=5), draining)
    assert ready(grace.complete(known, 11.0)) == ["a", "c"]
    assert [r.epoch for r in grace.complete(known, 11.0).replicas if r.name == "a"] == [5]
    assert ready(grace.complete(known, 16.0)) == ["a"]


def test_restarted_directory_twice_within_the_grace() -> None:
    grace = RestartGrace(grace_s=6.0)
    grace.complete(view(1, replica("a")), 0.0)
    grace.complete(view(2), 10.0)
    assert ready(grace.complete(view(3), 12.0)) == ["a"]
    assert ready(grace.complete(view(3), 17.9)) == ["a"]
    assert ready(grace.complete(view(3), 18.0)) == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0:8000", "10.0.0.1:8000"),
        ("[::]:8000", "10.0.0.1:8000"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("[::1]:9000", "[::1]:9000"),
    ],
)
def test_an_address_on_all_interfaces_is_reached_at_its_node(address: str, expected: str) -> None:
    assert reachable(address, "10.0.0.1") == expected
