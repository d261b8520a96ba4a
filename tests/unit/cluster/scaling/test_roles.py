"""Which worker takes another role, and when: on values and a clock of the test's."""

from __future__ import annotations

import pytest

from cluster.scaling.needs import PoolNeed, WorkerSample
from cluster.scaling.roles import RoleChange, RolePolicy
from protocol.ids import Role
from protocol.messages import WorkerLoad

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def sample(name: str, running: int = 0) -> WorkerSample:
    return WorkerSample(worker_id=name, age_s=60.0, load=WorkerLoad(running=running))


class Cluster:
    """Workers whose roles the policy changes, once a second."""

    def __init__(
        self, prefill: int, decode: int, *, min_workers: int = 1, cost_s: float = 2.0
    ) -> None:
        self.workers = {
            PREFILL: [sample(f"p{i}", i) for i in range(prefill)],
            DECODE: [sample(f"d{i}", 9 - i) for i in range(decode)],
        }
        self.policy = RolePolicy(dict.fromkeys(Role, min_workers), cost_s=cost_s)
        self.now = 0.0

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.workers[PREFILL]), len(self.workers[DECODE])

    def run(self, seconds: int, prefill: float, decode: float) -> list[RoleChange]:
        """Under needs of so many workers."""
        changes = []
        needs = {
            PREFILL: PoolNeed(workers=prefill, reason="prompts"),
            DECODE: PoolNeed(workers=decode, reason="sequences"),
        }
        for _ in range(seconds):
            self.now += 1.0
            change = self.policy.decide(self.workers, needs, self.now)
            if change is None:
                continue
            changes.append(change)
            for role in Role:
                kept = [w for w in self.workers[role] if w.worker_id != change.worker_id]
                self.workers[role] = kept + [sample(change.worker_id)] * (role is change.role)
        return changes


def test_the_least_busy_worker_goes_where_workers_are_missing() -> None:
    cluster = Cluster(1, 3)
    (change,) = cluster.run(10, prefill=2.0, decode=1.0)
    assert (change.worker_id, change.role) == ("d2", PREFILL)
    assert change.reason == ("prefill needs 2.0 workers and has 1, decode 1.0 and has 3: prompts")
    assert cluster.sizes == (2, 2)


def test_a_worker_changes_once_the_loss_has_reached_the_cost() -> None:
    """One pool has twice its load: a loss of a second each second."""
    for cost_s, seconds in ((1.0, 1), (2.0, 2), (5.0, 5)):
        cluster = Cluster(1, 3, cost_s=cost_s)
        assert cluster.run(1 + seconds - 1, prefill=2.0, decode=1.0) == []
        assert len(cluster.run(1, prefill=2.0, decode=1.0)) == 1


@pytest.mark.parametrize("needs", [(0.4, 2.9), (1.0, 3.0), (0.0, 0.0), (2.0, 6.0)])
def test_a_split_that_no_other_would_better_stays(needs: tuple[float, float]) -> None:
    cluster = Cluster(1, 3)
    assert cluster.run(100, *needs) == []
    assert cluster.sizes == (1, 3)


def test_a_load_that_flickers_changes_nothing() -> None:
    cluster = Cluster(2, 2)
    for _ in range(50):
        assert cluster.run(1, prefill=3.0, decode=1.0) == []
        assert cluster.run(1, prefill=1.0, decode=3.0) == []


def test_a_load_that_turns_is_followed_both_ways() -> None:
    cluster = Cluster(2, 2)
    cluster.run(30, prefill=3.0, decode=1.0)
    assert cluster.sizes == (3, 1)
    cluster.run(30, prefill=0.3, decode=3.5)
    assert cluster.sizes == (1, 3)


def test_each_role_keeps_its_least_workers() -> None:
    cluster = Cluster(2, 2, min_workers=2)
    assert cluster.run(50, prefill=9.0, decode=0.1) == []
    assert cluster.policy.view is not None
    assert cluster.policy.view.reason == "no other split would be better: prompts"
    free = Cluster(1, 2, min_workers=0)
    free.run(50, prefill=0.0, decode=9.0)
    assert free.sizes == (0, 3)


def test_a_pause_of_the_decider_counts_as_no_more_than_a_few_seconds() -> None:
    cluster = Cluster(1, 3, cost_s=20.0)
    cluster.run(1, prefill=2.0, decode=1.0)
    cluster.now += 1e6
    assert cluster.run(1, prefill=2.0, decode=1.0) == []


def test_the_view_says_how_far_a_change_is() -> None:
    cluster = Cluster(1, 3, cost_s=4.0)
    cluster.run(3, prefill=2.0, decode=1.0)
    view = cluster.policy.view
    assert view is not None
    assert view.reason == "prefill lacks workers, for 50 % of what a change costs so far"
    assert (view.workers[PREFILL], view.need[PREFILL]) == (1, 2.0)
