"""The directory's class as a plain object: long polls, and the admin backend on it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.config.schema import ClusterConfig, LifecycleSection, ModelSection
from cluster.membership.directory import Directory
from cluster.membership.table import Pool, Replica, View, ViewChange
from cluster.serve.admin import ClusterAdmin, drain_worker
from cluster.serve.control import PoolStatus
from protocol.errors import InvalidRequest, NotFound, Unavailable
from protocol.ids import Role
from protocol.messages import Ack
from protocol.states import WorkerState
from router.admin import ClusterInfo, PoolInfo, RouterInfo
from rpc.methods import DRAIN
from rpc.server import ControlServer

SECRET = b"s" * 16
#: However busy the machine is, no member expires.
CONFIG = ClusterConfig(model=ModelSection(name="tiny"), lifecycle=LifecycleSection(expiry_s=600.0))


def replica(name: str = "decode-1", pool: Pool = Pool.DECODE, **fields: Any) -> Replica:
    return Replica(name=name, epoch=1, pool=pool, state=WorkerState.READY, **fields)


@pytest.fixture
def directory() -> Directory:
    return Directory(secret=SECRET, config=CONFIG)


async def test_keeps_secret_and_config(directory: Directory) -> None:
    assert await directory.secret() == SECRET
    assert await directory.config() is CONFIG


async def test_watch_returns_at_once_what_is_new(directory: Directory) -> None:
    await directory.report(replica())
    view = await directory.watch(-1, -1, 60.0)
    assert [m.name for m in view.replicas] == ["decode-1"]


async def test_watch_wakes_every_watcher_on_change(directory: Directory) -> None:
    view = await directory.view()
    watchers = [
        asyncio.create_task(directory.watch(view.incarnation, view.version, 60.0)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    await directory.report(replica())
    views = await asyncio.wait_for(asyncio.gather(*watchers), 60)
    assert all(len(v.replicas) == 1 for v in views)


async def test_watch_ends_after_its_time(directory: Directory) -> None:
    view = await directory.view()
    same = await asyncio.wait_for(directory.watch(view.incarnation, view.version, 0.05), 60)
    assert (same.incarnation, same.version) == (view.incarnation, view.version)


async def test_watch_notices_an_expiry_by_itself() -> None:
    times = LifecycleSection(heartbeat_s=0.05, expiry_s=0.3)
    directory = Directory(secret=SECRET, config=replace(CONFIG, lifecycle=times))
    await directory.report(replica())
    known = directory._table.view()
    assert [m.name for m in known.replicas] == ["decode-1"]
    later = await asyncio.wait_for(directory.watch(known.incarnation, known.version, 600.0), 60)
    assert later.replicas == ()


async def test_reports_that_arrived_during_a_stall_are_handled_before_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watcher may wake before the reports that arrived meanwhile are handled."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("cluster.membership.directory.time", clock)
    now = 100.0
    directory = Directory(secret=SECRET, config=replace(CONFIG, lifecycle=LifecycleSection()))
    await directory.report(replica())
    now += 3600.0
    assert [m.name for m in (await directory.view()).replicas] == ["decode-1"]
    await directory.report(replica())
    for _ in range(3):
        now += 1.5
        assert [m.name for m in (await directory.view()).replicas] == ["decode-1"]
    now += 1.5
    assert (await directory.view()).replicas == ()


async def test_leave_is_announced(directory: Directory) -> None:
    await directory.report(replica())
    view = await directory.view()
    watcher = asyncio.create_task(directory.watch(view.incarnation, view.version, 60.0))
    await asyncio.sleep(0)
    await directory.leave("decode-1", 1)
    assert (await asyncio.wait_for(watcher, 60)).replicas == ()


async def test_two_directories_never_share_an_incarnation(directory: Directory) -> None:
    other = Directory(secret=SECRET, config=CONFIG)
    assert (await directory.view()).incarnation != (await other.view()).incarnation


async def test_followers_are_told_what_has_changed(directory: Directory) -> None:
    for number in range(3):
        await directory.report(replica(f"decode-{number}"))
    whole = await directory.follow(-1, -1, 60.0)
    assert isinstance(whole, View)
    await directory.report(replica("prefill-9", Pool.PREFILL))
    await directory.report(replica("decode-1", http="changed"))
    await directory.leave("decode-2", 1)
    change = await directory.follow(whole.incarnation, whole.version, 60.0)
    assert isinstance(change, ViewChange)
    assert {r.name for r in change.replicas} == {"prefill-9", "decode-1"}
    assert change.gone == ("decode-2",)
    assert change.applied(whole) == await directory.view()
    same = await directory.follow(change.incarnation, change.version, 0.0)
    assert isinstance(same, ViewChange)
    assert (same.replicas, same.gone) == ((), ())


async def test_a_heartbeat_is_answered_what_has_changed(directory: Directory) -> None:
    assert await directory.report(replica()) is None  # as of a router, which follows
    whole = await directory.report(replica(), known=(-1, -1))
    assert isinstance(whole, View)
    await directory.report(replica("prefill-9", Pool.PREFILL))
    change = await directory.report(replica(), known=(whole.incarnation, whole.version))
    assert isinstance(change, ViewChange)
    assert [r.name for r in change.replicas] == ["prefill-9"]
    told = pickle.loads(pickle.dumps((whole, change)))
    assert told == (whole, change)
    assert told[1].applied(told[0]) == await directory.view()


async def test_a_view_that_is_too_old_is_replaced(directory: Directory) -> None:
    await directory.report(replica())
    first = await directory.view()
    for number in range(5000):
        await directory.report(replica(http=f"h:{number}"))
    assert isinstance(await directory.follow(first.incarnation, first.version, 1.0), View)
    assert isinstance(await directory.follow(first.incarnation + 1, first.version, 1.0), View)


async def test_a_change_among_a_thousand_holds_no_one_up(directory: Directory) -> None:
    """Each follower gets one replica, not a thousand."""
    for number in range(1000):
        await directory.report(replica(f"decode-{number}"))
    view = await directory.view()
    following = [
        asyncio.create_task(directory.follow(view.incarnation, view.version, 60.0))
        for _ in range(1000)
    ]
    await asyncio.sleep(0)
    await directory.leave("decode-7", 1)
    changes = await asyncio.wait_for(asyncio.gather(*following), 60)
    assert {len(pickle.dumps(change)) < 1000 for change in changes} == {True}
    assert all(change.gone == ("decode-7",) for change in changes)
    assert not directory._waiting


async def test_reports_pass_between_the_followers_that_are_told(directory: Directory) -> None:
    await directory.report(replica())
    view = await directory.view()
    told: list[str] = []

    async def follow() -> None:
        await directory.follow(view.incarnation, view.version, 60.0)
        told.append("follower")

    async def report() -> None:
        await directory.report(replica("decode-2"))  # another change, while they are told of one
        told.append("report")

    tasks = [asyncio.create_task(follow()) for _ in range(1000)]
    await asyncio.sleep(0)
    await directory.leave("decode-1", 1)
    tasks.append(asyncio.create_task(report()))
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert told.index("report") < 200
    assert len(told) == 1001


async def test_followers_that_leave_while_they_are_told_hold_no_one_up(
    directory: Directory,
) -> None:
    view = await directory.view()
    following = [
        asyncio.create_task(directory.follow(view.incarnation, view.version, 60.0))
        for _ in range(1000)
    ]
    await asyncio.sleep(0)
    await directory.report(replica())
    for task in following[::2]:
        task.cancel()
    changes = await asyncio.wait_for(asyncio.gather(*following[1::2]), 60)
    assert {tuple(each.name for each in change.replicas) for change in changes} == {("decode-1",)}
    assert not directory._waiting


async def test_a_follower_that_hears_of_nothing_leaves_nothing(directory: Directory) -> None:
    view = await directory.view()
    for _ in range(3):
        await directory.follow(view.incarnation, view.version, 0.001)
    assert not directory._waiting


# --- the admin backend of routers -----------------------------------------------------------------


OWN = ClusterInfo(
    model="tiny",
    pools=tuple(PoolInfo(role=role, workers=()) for role in Role),
    routers=(
        RouterInfo(
            router_id="me", http_address="h:1", grpc_address="g:1", state="ready", requests=2
        ),
    ),
)


class Handle:
    """The interface of an actor handle."""

    def __init__(self, directory: Directory) -> None:
        self.view = Remote(directory.view)
        self.scaling = Remote(directory.scaling)
        self.pin = Remote(directory.pin)
        self.config = Remote(directory.config)


class Remote:
    def __init__(self, method: Any) -> None:
        self.remote = method


@pytest.fixture
def scaled() -> list[dict[Pool, int]]:
    return []


@pytest.fixture
def admin(directory: Directory, scaled: list[dict[Pool, int]]) -> ClusterAdmin:
    def scale(config: ClusterConfig, wanted: Mapping[Pool, int]) -> None:
        assert config is CONFIG
        scaled.append(dict(wanted))

    return ClusterAdmin(Handle(directory), secret=SECRET, scale=scale)


async def test_scale_touches_only_the_pools_named(
    admin: ClusterAdmin, scaled: list[dict[Pool, int]]
) -> None:
    await admin.scale({Role.DECODE: 3})
    await admin.scale({Role.PREFILL: 0, Role.DECODE: 1})
    assert scaled == [{Pool.DECODE: 3}, {Pool.PREFILL: 0, Pool.DECODE: 1}]


async def test_a_size_that_is_refused_pins_nothing(directory: Directory) -> None:
    """Of two autoscaled pools an operator had pinned one before."""
    pinned: set[Role] = {Role.PREFILL}

    async def pin(roles: Collection[Role], wanted: bool) -> frozenset[Role]:
        before = set(pinned)
        pinned.update(roles) if wanted else pinned.difference_update(roles)
        return frozenset(before ^ pinned)

    def no_room(config: ClusterConfig, wanted: Mapping[Pool, int]) -> None:
        assert pinned == set(Role)
        raise InvalidRequest("no room", param="decode.replicas")

    handle = Handle(directory)
    handle.pin = Remote(pin)
    admin = ClusterAdmin(handle, secret=SECRET, scale=no_room)
    with pytest.raises(InvalidRequest, match="no room"):
        await admin.scale({Role.PREFILL: 9, Role.DECODE: 9})
    assert pinned == {Role.PREFILL}


async def test_what_the_directory_refuses_stays_typed(directory: Directory) -> None:
    """Ray wraps what an actor raises."""

    async def pin(*_: object) -> None:
        refusal = InvalidRequest("prefill.max_replicas is not set", param="prefill.max_replicas")
        raise RayTaskError("pin", "traceback", refusal).as_instanceof_cause()

    handle = Handle(directory)
    handle.pin = Remote(pin)
    admin = ClusterAdmin(handle, secret=SECRET, scale=lambda *_: None)
    with pytest.raises(InvalidRequest) as caught:
        await admin.scale({}, automatic=[Role.PREFILL])
    assert caught.value.param == "prefill.max_replicas"
    assert caught.value.message == "prefill.max_replicas is not set"


async def test_view_adds_targets_and_other_routers(
    admin: ClusterAdmin, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = PoolStatus(
        pool=Pool.DECODE, target=4, replicas={}, healthy=True, failed=False, message=""
    )
    monkeypatch.setattr("cluster.serve.admin.pool_statuses", lambda: {Pool.DECODE: status})
    await directory.report(replica("me", Pool.ROUTER, http="h:1", grpc="g:1"))
    await directory.report(replica("r-beside", Pool.ROUTER, http="h:1", grpc="g:1"))
    await directory.report(replica("r-other", Pool.ROUTER, http="h:2", grpc="g:2"))
    view = await admin.view(OWN)
    assert {pool.role: pool.target for pool in view.pools} == {Role.PREFILL: None, Role.DECODE: 4}
    assert [(r.router_id, r.grpc_address) for r in view.routers] == [
        ("me", "g:1"),
        ("r-beside", "g:1"),
        ("r-other", "g:2"),
    ]


async def test_a_cluster_that_does_not_answer_is_a_typed_error(directory: Directory) -> None:
    async def gone() -> View:
        raise RayActorError

    def no_serve(config: ClusterConfig, wanted: Mapping[Pool, int]) -> None:
        raise GetTimeoutError("no answer")

    handle = Handle(directory)
    handle.view = Remote(gone)
    admin = ClusterAdmin(handle, secret=SECRET, scale=no_serve)
    for call in (admin.view(OWN), admin.drain("decode-1"), admin.scale({Role.PREFILL: 1})):
        with pytest.raises(Unavailable, match="the cluster does not answer"):
            await call


async def test_a_hanging_serve_occupies_no_threads_of_requests(
    admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()

    def away() -> dict[Pool, PoolStatus]:
        back.wait(60)
        return {}

    monkeypatch.setattr("cluster.serve.admin.pool_statuses", away)
    monkeypatch.setattr("cluster.serve.admin._CALL_S", 0.05)
    try:
        async with asyncio.timeout(60):
            views = await asyncio.gather(
                *(admin.view(OWN) for _ in range(64)), return_exceptions=True
            )
            assert {type(view) for view in views} == {Unavailable}
            assert await asyncio.to_thread(lambda: 42) == 42
    finally:
        back.set()


async def test_drain_reaches_the_worker() -> None:
    asked = []

    async def on_drain(command: Any) -> Ack:
        asked.append(command)
        return Ack()

    server = ControlServer(secret=SECRET)
    server.add({DRAIN: on_drain})
    address = server.bind("127.0.0.1")
    await server.start()
    try:
        view = View(incarnation=1, version=1, replicas=(replica(address=address),))
        drained = await drain_worker(view, "decode-1", secret=SECRET)
    finally:
        await server.stop()
    assert len(asked) == 1
    assert drained.state is WorkerState.DRAINING


async def test_drain_names_the_workers_there_are() -> None:
    router = replica("router-1", Pool.ROUTER)
    with pytest.raises(NotFound, match="there are: decode-1"):
        await drain_worker(
            View(incarnation=1, version=1, replicas=(replica(), router)), "router-1", secret=SECRET
        )
    with pytest.raises(NotFound, match="there are: none"):
        await drain_worker(View(incarnation=1, version=1), "x", secret=SECRET)
