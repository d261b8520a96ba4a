"""The loop around the policy, with a cluster manager of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from cluster.config.schema import ClusterConfig, ModelSection, PoolSection, ScalingSection
from cluster.membership.directory import Directory
from cluster.membership.table import Pool, Replica
from cluster.scaling.autoscaler import Autoscaler, Reported, RunningPool, make_autoscaler
from protocol.errors import InvalidRequest, Unavailable
from protocol.ids import Role
from protocol.loads import RouterLoad
from protocol.messages import WorkerLoad
from protocol.states import WorkerState
from router.admin import PoolSize

CONFIG = ClusterConfig(
    model=ModelSection(name="tiny"),
    prefill=PoolSection(max_replicas=4),
    decode=PoolSection(max_replicas=4),
    scaling=ScalingSection(keep_s=10.0),
)


class Manager:
    """Starts workers at once; a drained one runs until `end`."""

    def __init__(self) -> None:
        self.pools = {role: [f"{role}-0"] for role in Role}
        self.wanted = dict.fromkeys(Role, 1)
        self.drained: list[str] = []
        self.stored: list[Role] = []
        self.full = False
        self.calls: list[tuple[Role, int]] = []

    def sizes(self) -> Mapping[Role, RunningPool]:
        return {
            role: RunningPool(wanted=self.wanted[role], running=frozenset(names))
            for role, names in self.pools.items()
        }

    def scale(self, sizes: Mapping[Role, int]) -> None:
        if self.full:
            raise InvalidRequest("prefill.replicas: no node has room")
        for role, size in sizes.items():
            self.calls.append((role, size))
            self.wanted[role] = size
            while len(self.pools[role]) < size:
                self.pools[role].append(f"{role}-{len(self.calls)}{len(self.pools[role])}")

    async def drain(self, worker_id: str) -> None:
        self.drained.append(worker_id)

    async def change_role(self, worker_id: str, role: Role) -> None:
        if self.full:
            raise Unavailable("no answer")
        self.end(worker_id)
        self.pools[role].append(worker_id)

    def end(self, worker_id: str) -> None:
        """The worker has finished what it had."""
        for names in self.pools.values():
            if worker_id in names:
                names.remove(worker_id)

    def pinned(self) -> list[Role]:
        return self.stored

    def pin(self, roles: Iterable[Role]) -> None:
        self.stored = list(roles)


class Cluster:
    """Replicas that report, and the autoscaler that looks at them."""

    def __init__(self, config: ClusterConfig = CONFIG) -> None:
        self.manager = Manager()
        self.arrived = 0
        self.router_epoch = 1
        self.cached = {}
        self.now = 0.0
        self.announced = 0
        self.scaler: Autoscaler = make_autoscaler(
            config, self.manager, self.reported, on_change=self._changed
        )

    def _changed(self) -> None:
        self.announced += 1

    def reported(self) -> list[Reported]:
        workers = [
            Reported(
                name=name,
                epoch=1,
                role=role,
                load=WorkerLoad(
                    tokens_per_second=100.0,
                    total_blocks=100,
                    cached_blocks=self.cached.get(name, 9),
                ),
            )
            for role, names in self.manager.pools.items()
            for name in names
            if name not in self.manager.drained
        ]
        load = RouterLoad(arrived_tokens=self.arrived)
        return [*workers, Reported(name="r", epoch=self.router_epoch, role=None, load=load)]

    async def run(self, seconds: int, *, rate: int = 0) -> dict[Role, int]:
        for _ in range(seconds):
            self.now += 1.0
            self.arrived += rate
            await self.scaler.step(self.now)
        return self.manager.wanted


async def test_pools_grow_and_shrink_by_draining_the_least_cached_worker() -> None:
    cluster = Cluster()
    assert (await cluster.run(30, rate=200))[Role.PREFILL] == 3
    names = list(cluster.manager.pools[Role.PREFILL])
    cluster.cached = {names[0]: 1, names[1]: 2}
    assert (await cluster.run(40))[Role.PREFILL] == 3  # until the drained ones have gone
    assert cluster.manager.drained == names[:2]
    cluster.manager.end(names[0])
    assert (await cluster.run(1))[Role.PREFILL] == 2
    cluster.manager.end(names[1])
    assert (await cluster.run(20))[Role.PREFILL] == 1
    assert cluster.manager.pools[Role.PREFILL] == names[2:]
    prefill = next(s for s in cluster.scaler.scaling() if s.role is Role.PREFILL)
    assert (prefill.wanted, prefill.least, prefill.most) == (1, 1, 4)
    assert prefill.change.startswith("shrank from 2 to 1: enough for 10 s: 1")
    assert cluster.announced >= 3


async def test_a_drained_worker_is_replaced_when_the_load_returns() -> None:
    cluster = Cluster()
    await cluster.run(30, rate=200)
    await cluster.run(40)
    assert len(cluster.manager.drained) == 2
    calls = len(cluster.manager.calls)
    assert (await cluster.run(20, rate=200))[Role.PREFILL] == 3
    assert len(cluster.manager.calls) == calls  # the places were not given up
    for name in cluster.manager.drained:
        cluster.manager.end(name)
    assert (await cluster.run(9, rate=200))[Role.PREFILL] == 3
    assert len(cluster.manager.calls) == calls


async def test_a_pinned_pool_is_left_alone_also_after_a_restart() -> None:
    cluster = Cluster()
    assert await cluster.scaler.pin([Role.PREFILL], pinned=True) == {Role.PREFILL}
    assert await cluster.scaler.pin([Role.PREFILL], pinned=True) == set()
    assert (await cluster.run(40, rate=200))[Role.PREFILL] == 1
    assert next(s for s in cluster.scaler.scaling() if s.role is Role.PREFILL).pinned
    again = Cluster()
    again.manager.stored = [Role.PREFILL]
    assert (await again.run(40, rate=200))[Role.PREFILL] == 1
    await again.scaler.pin([Role.PREFILL], pinned=False)
    assert (await again.run(40, rate=200))[Role.PREFILL] == 3


async def test_a_worker_of_the_other_pool_is_not_ended() -> None:
    """Its role was changed by hand: its place is in the pool that it began in."""
    cluster = Cluster()
    cluster.manager.pools[Role.PREFILL].append("decode-7")
    cluster.cached = {"decode-7": 0}
    running = cluster.manager.sizes

    def sizes() -> Mapping[Role, RunningPool]:
        found = dict(running())
        pool = found[Role.PREFILL]
        found[Role.PREFILL] = replace(pool, running=pool.running - {"decode-7"})
        return found

    cluster.manager.sizes = sizes  # type: ignore[method-assign]
    await cluster.run(30, rate=200)
    await cluster.run(40)
    assert cluster.manager.drained
    assert "decode-7" not in cluster.manager.drained


async def test_a_cluster_without_room_is_asked_again_later() -> None:
    cluster = Cluster()
    cluster.manager.full = True
    assert (await cluster.run(30, rate=200))[Role.PREFILL] == 1
    cluster.manager.full = False
    assert (await cluster.run(30, rate=200))[Role.PREFILL] == 3


async def test_a_new_router_does_not_count_as_a_burst() -> None:
    cluster = Cluster()
    await cluster.run(30, rate=20)
    cluster.arrived, cluster.router_epoch = 10**9, 2
    assert (await cluster.run(30, rate=20))[Role.PREFILL] == 1


async def test_a_pool_without_bounds_keeps_its_size() -> None:
    cluster = Cluster(replace(CONFIG, prefill=PoolSection()))
    assert (await cluster.run(60, rate=1000))[Role.PREFILL] == 1
    assert [pool.role for pool in cluster.scaler.scaling()] == [Role.DECODE]


async def test_the_directory_scales_by_what_replicas_report() -> None:
    manager = Manager()
    directory = Directory(
        secret=b"s" * 16, config=CONFIG, make_backend=lambda config, secret, view: manager
    )
    replica = Replica(name="prefill-0", epoch=1, pool=Pool.PREFILL, state=WorkerState.READY)
    await directory.report(replica, WorkerLoad(tokens_per_second=100.0, cached_blocks=3))
    starting = structs.replace(replica, name="prefill-1", state=WorkerState.STARTING)
    await directory.report(starting, WorkerLoad())
    assert [r.load for r in directory._reported()] == [
        WorkerLoad(tokens_per_second=100.0, cached_blocks=3)
    ]
    before = (await directory.view()).version
    await directory.pin([Role.DECODE], True)
    view = await directory.watch((await directory.view()).incarnation, before, 30.0)
    assert PoolSize(role=Role.DECODE, wanted=1, pinned=True) in view.sizes
    assert {pool.role for pool in await directory.scaling()} == set(Role)
    for task in directory._tasks:
        task.cancel()


async def test_a_pool_that_is_not_autoscaled_cannot_become_automatic() -> None:
    directory = Directory(secret=b"s" * 16, config=replace(CONFIG, decode=PoolSection()))
    with pytest.raises(InvalidRequest, match=r"decode\.max_replicas is not set"):
        await directory.pin([Role.DECODE], False)
    await directory.pin([Role.DECODE], True)


FOLLOWING = ClusterConfig(
    model=ModelSection(name="tiny"),
    prefill=PoolSection(replicas=1),
    decode=PoolSection(replicas=3),
    scaling=ScalingSection(roles=True),
)


async def test_roles_follow_the_load_in_pools_that_keep_their_size() -> None:
    cluster = Cluster(FOLLOWING)
    cluster.manager.pools[Role.DECODE] = ["d-0", "d-1", "d-2"]
    assert cluster.scaler.roles(0.0) is None
    cluster.manager.full = True
    await cluster.run(20, rate=200)
    assert len(cluster.manager.pools[Role.DECODE]) == 3  # no answer: tried again
    cluster.manager.full = False
    await cluster.run(20, rate=200)
    assert cluster.manager.pools[Role.PREFILL] == ["prefill-0", "d-0", "d-1"]
    assert cluster.manager.calls == []
    state = cluster.scaler.roles(cluster.now)
    assert state is not None
    assert state.change is not None
    assert (state.change.worker_id, state.change.role) == ("d-1", Role.PREFILL)
    assert state.view.workers == {Role.PREFILL: 3, Role.DECODE: 1}
    assert state.view.need[Role.PREFILL] == pytest.approx(2.5)


async def test_roles_that_are_fixed_stay() -> None:
    cluster = Cluster(replace(FOLLOWING, scaling=ScalingSection()))
    await cluster.run(40, rate=200)
    assert cluster.manager.pools == {role: [f"{role}-0"] for role in Role}
