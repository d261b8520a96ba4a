"""As test_between_schedulers, for models whose layers have windows."""

from __future__ import annotations

import pytest

from protocol.kv_layout import KVGroup
from tests.support.worker_world import WorkerWorld

FROM_HOST = "kv_tier_hit_tokens_total{tier=host}"
FULL = KVGroup()
GROUPS = {
    "full and window": (FULL, KVGroup(window=6)),
    "full and two windows": (FULL, KVGroup(window=5), KVGroup(window=5)),
    "window of a block": (FULL, KVGroup(window=4)),
    "window of one token": (FULL, KVGroup(window=1)),
    "window only": (KVGroup(window=7),),
    "two windows": (KVGroup(window=9), KVGroup(window=3)),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("seed", range(4))
def test_without_faults_requests_finish(seed, groups):
    world = WorkerWorld(seed, fault_rate=0.0, one_sided=seed % 2 == 1, groups=groups)
    assert world.run(12) == {"finished": 12}


def test_windows_come_from_host_memory():
    loaded = 0
    for seed in range(52, 55):
        world = WorkerWorld(seed, fault_rate=0.02, one_sided=False, groups=GROUPS["two windows"])
        world.run(12)
        for worker in world.workers:
            loaded += worker.scheduler.snapshot().counters.get(FROM_HOST, 0)
    assert loaded > 0


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("seed", range(100, 108))
def test_under_faults_tokens_are_right_and_nothing_is_left(seed, groups):
    ends = WorkerWorld(seed, fault_rate=0.08, one_sided=seed % 2 == 1, groups=groups).run(12)
    assert ends.total() == 12
