"""Pool status from Serve's details, and how commands use it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs
from ray.exceptions import GetTimeoutError

from cluster.cli import waiting
from cluster.cli.console import Console
from cluster.cli.operate import _worker_row
from cluster.cli.waiting import _last_line, _progress, _raise_failed, _raise_resized, _reached
from cluster.config.schema import ClusterConfig, ModelSection, PlacementSection, PoolSection
from cluster.membership.table import Pool, Replica, View
from cluster.serve import control
from cluster.serve.admin import set_role
from cluster.serve.control import PoolStatus, _pool_status
from cluster.serve.follower_rank import gpu_index, process_env, runtime_env
from engine.config import EngineConfig
from protocol.errors import Internal, InvalidRequest, NotFound, Unavailable
from protocol.ids import Role
from protocol.messages import WorkerLoad
from protocol.states import WorkerState
from tests.support.stub_workers import StubFleet

READY, DRAINING = WorkerState.READY, WorkerState.DRAINING
NEVER = object()  # a call without an answer


def details(**deployment: object) -> dict[str, object]:
    return {"status": "RUNNING", "message": "", "deployments": {"decode": deployment}}


def test_pool_status_counts_states() -> None:
    states = {"a": "RUNNING", "b": "RUNNING", "c": "STOPPING"}
    replicas = [{"replica_id": name, "state": state} for name, state in states.items()]
    status = _pool_status(
        Pool.DECODE, details(status="HEALTHY", target_num_replicas=2, replicas=replicas)
    )
    assert status == PoolStatus(
        pool=Pool.DECODE,
        target=2,
        replicas={"RUNNING": 2, "STOPPING": 1},
        healthy=True,
        failed=False,
        message="",
        running=frozenset({"a", "b"}),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"status": "DEPLOY_FAILED", "message": "why"},
        {"status": "UNHEALTHY", "status_trigger": "REPLICA_STARTUP_FAILED", "message": "why"},
    ],
)
def test_failed_to_start(given: dict[str, object]) -> None:
    status = _pool_status(Pool.DECODE, details(**given))
    assert status.failed
    assert not status.healthy
    with pytest.raises(Internal, match="the decode pool cannot start: why"):
        _raise_failed({Pool.DECODE: status})


@pytest.mark.parametrize("status", ["UNHEALTHY", "DEPLOY_FAILED", "HEALTHY"])
def test_the_end_of_the_change_before_is_not_that_of_this_one(status: str) -> None:
    known = details(status=status, status_trigger="REPLICA_STARTUP_FAILED", message="why")
    found = _pool_status(Pool.DECODE, known | {"status": "DEPLOYING"})
    assert (found.failed, found.healthy) == (False, False)


def test_unhealthy_is_not_failed() -> None:
    given = {"status": "UNHEALTHY", "status_trigger": "HEALTH_CHECK_FAILED"}
    status = _pool_status(Pool.DECODE, details(**given))
    assert not status.failed
    _raise_failed({Pool.DECODE: status})


def test_waiting_ends_when_another_command_resizes_a_pool() -> None:
    """A pool that Serve is about to create has no size yet."""
    coming = _pool_status(Pool.PREFILL, {"deployments": {}})
    made, emptied = (replace(coming, target=target) for target in (1, 0))
    _raise_resized({Pool.PREFILL: made}, {Pool.PREFILL: 1, Pool.DECODE: 2})
    _raise_resized({Pool.PREFILL: coming}, {Pool.PREFILL: 1})
    with pytest.raises(Unavailable, match=r"^the prefill pool was scaled to 1 meanwhile$"):
        _raise_resized({Pool.PREFILL: made}, {Pool.PREFILL: 2})
    with pytest.raises(Unavailable, match=r"^the prefill pool was scaled to 0 meanwhile$"):
        _raise_resized({Pool.PREFILL: emptied}, {Pool.PREFILL: 2})


class Controller:
    """Serve's controller: a deleted application is listed once more. It never answers the method
    `silent`."""

    def __init__(self, *names: str, silent: str = "") -> None:
        self.names = list(names)
        self.silent = silent
        self.doomed: list[str] = []
        self.beside: list[set[str]] = []  # applications deleted together
        self.shut_down = False

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name == self.silent:
            return SimpleNamespace(remote=lambda *arguments: NEVER)
        return SimpleNamespace(remote=lambda *arguments: getattr(self, f"_{name}")(*arguments))

    def _get_serve_instance_details(self) -> dict[str, object]:
        found = {"applications": {name: details() for name in self.names}}
        self.names = [name for name in self.names if name not in self.doomed]
        return found

    def _delete_apps(self, names: list[str]) -> None:
        self.doomed += names
        self.beside.append(set(names) & set(self.names))

    def _graceful_shutdown(self) -> None:
        self.shut_down = True


def serve(monkeypatch: pytest.MonkeyPatch, *names: str, silent: str = "") -> Controller:
    """A Serve that runs these applications."""

    def get(value: object, timeout: float | None = None) -> object:
        assert timeout is not None, "a call without a timeout"
        if value is NEVER:
            raise GetTimeoutError
        return value

    controller = Controller(*names, silent=silent)
    monkeypatch.setattr(control, "_controller", lambda: controller)
    monkeypatch.setattr(control.ray, "get", get)
    return controller


@pytest.mark.parametrize(
    ("names", "left", "shut_down"),
    [
        (["router", "decode"], [], True),
        (["router", "chatbot", "decode"], ["chatbot"], False),
    ],
)
def test_undeploy_ends_only_batons_pools(
    names: list[str], left: list[str], shut_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve itself is shut down only when it has no other applications. Workers stay until the
    routers are gone."""
    controller = serve(monkeypatch, *names)
    control.undeploy(10.0)
    assert (controller.names, controller.shut_down) == (left, shut_down)
    assert controller.beside == [{"router"}, {"decode"}]


def test_pools_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = serve(monkeypatch, "router", "prefill", "decode")
    with pytest.raises(Unavailable, match=r"not ended in time: router$"):
        control.undeploy(-1.0)
    with pytest.raises(Unavailable, match=r"not ended in time: decode, prefill$"):
        control.undeploy(-1.0)
    assert not controller.shut_down


def test_a_hanging_controller_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = serve(monkeypatch, "router", "prefill", "decode", silent="delete_apps")
    with pytest.raises(Unavailable, match="did not answer delete_apps within 30 s"):
        control.undeploy(600.0)
    controller.silent = "update_deployment_replicas"
    with pytest.raises(Unavailable, match="did not answer update_deployment_replicas within 30 s"):
        control.set_replicas(Pool.DECODE, 2)
    controller.silent = "get_serve_instance_details"
    with pytest.raises(Unavailable, match="did not answer get_serve_instance_details within 30 s"):
        control.pool_statuses()


def test_a_directory_without_answer_is_not_waited_for_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    def get(calls: list[object], timeout: float) -> None:
        assert calls == [NEVER]
        limits.append(timeout)
        raise GetTimeoutError

    directory = SimpleNamespace(watch=SimpleNamespace(remote=lambda *arguments: NEVER))
    monkeypatch.setattr(waiting, "find_directory", lambda: directory)
    monkeypatch.setattr("ray.get", get)
    with pytest.raises(Unavailable, match="the directory does not answer"):
        waiting.wait_for({}, Console(), deadline=0.0, exact=False)
    assert limits == [2.0]


def test_pool_that_is_only_being_deployed() -> None:
    status = _pool_status(Pool.DECODE, {"status": "DEPLOYING", "deployments": {}})
    assert (status.target, status.replicas) == (None, {})
    assert (status.healthy, status.failed) == (False, False)


def test_last_line_is_the_reason() -> None:
    text = "Traceback (most recent call last):\n  File x\nValueError: no room\n\n"
    assert _last_line(text) == "ValueError: no room"
    assert _last_line("protocol.errors.Unsupported: device: no\n") == "device: no"
    assert _last_line(" \n") == "no reason given"


def replica(name: str, pool: Pool, state: WorkerState = READY) -> Replica:
    return Replica(name=name, epoch=1, pool=pool, state=state)


def test_when_a_size_is_reached() -> None:
    view = View(
        incarnation=1,
        version=1,
        replicas=(
            replica("p1", Pool.PREFILL),
            replica("d1", Pool.DECODE),
            replica("d2", Pool.DECODE, DRAINING),
        ),
    )
    wanted = {Pool.PREFILL: 1, Pool.DECODE: 1}
    assert _reached(view, wanted, exact=False, revisions={})
    assert not _reached(view, wanted, exact=True, revisions={}), "a draining worker is still there"
    assert not _reached(view, {Pool.DECODE: 2}, exact=False, revisions={})
    assert _reached(view, {Pool.ROUTER: 0}, exact=True, revisions={})
    assert _progress(view, wanted, {}) == "prefill 1/1, decode 1/1 (1 draining) ready"


def test_a_change_that_is_taken_back_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that is ready has the wanted revision, but Serve is about to replace it."""
    healthy = _pool_status(Pool.DECODE, details(status="HEALTHY", target_num_replicas=1))
    statuses = iter([replace(healthy, healthy=False), healthy])
    view = View(
        incarnation=1,
        version=1,
        replicas=(structs.replace(replica("d1", Pool.DECODE), revision="r"),),
    )
    directory = SimpleNamespace(watch=SimpleNamespace(remote=lambda *_: view))
    monkeypatch.setattr(waiting, "find_directory", lambda: directory)
    monkeypatch.setattr(waiting, "pool_statuses", lambda: {Pool.DECODE: next(statuses)})
    monkeypatch.setattr("cluster.cli.session.ask", lambda *answers, timeout_s: answers)
    one = {Pool.DECODE: 1}
    wait = waiting.wait_for
    assert wait(one, Console(), deadline=1e9, exact=True, revisions={Pool.DECODE: "r"}) is view
    assert next(statuses, None) is None


def test_a_worker_without_answer_has_a_row() -> None:
    row = _worker_row(replica("d1", Pool.DECODE), None)
    assert row[:3] == ("d1", "decode", "no answer")
    assert len(row) == 15


def test_blocks_of_a_row_add_up_to_the_total() -> None:
    """Cached blocks count as free for a new request, but not in this row."""
    load = WorkerLoad(
        free_blocks=97, held_blocks=2, cached_blocks=30, quarantined_blocks=1, total_blocks=100
    )
    status = SimpleNamespace(
        state=READY, role=Role.DECODE, load=load, steps=7, precision="", tiers=()
    )
    assert _worker_row(replica("d1", Pool.DECODE), status)[5:10] == (67, 2, 30, 1, 100)


async def test_the_last_worker_that_decodes_keeps_its_role() -> None:
    """Workers say what they do now: the view that both commands see is the one before them."""
    fleet = StubFleet()
    try:
        decode, prefill = [await fleet.add(role) for role in (Role.DECODE, Role.PREFILL)]
        known = [
            structs.replace(replica(ref.worker_id, Pool(ref.role)), address=ref.address)
            for ref in fleet.refs
        ]
        view = View(incarnation=1, version=1, replicas=tuple(known))
        with pytest.raises(InvalidRequest) as caught:
            await set_role(view, decode.name, Role.PREFILL, secret=fleet.secret)
        assert caught.value.param == "role"
        with pytest.raises(NotFound):
            await set_role(view, "d2", Role.PREFILL, secret=fleet.secret)
        await set_role(view, prefill.name, Role.DECODE, secret=fleet.secret)
        await set_role(view, decode.name, Role.PREFILL, secret=fleet.secret)
        assert (decode.role, prefill.role) == (Role.PREFILL, Role.DECODE)
        with pytest.raises(InvalidRequest):
            await set_role(view, prefill.name, Role.PREFILL, secret=fleet.secret)
        await set_role(view, decode.name, Role.DECODE, secret=fleet.secret)
        await prefill.stop()
        with pytest.raises(InvalidRequest):  # the other one does not answer
            await set_role(view, decode.name, Role.PREFILL, secret=fleet.secret)
    finally:
        await fleet.stop()


def test_thread_counts_are_set_in_the_environment() -> None:
    def env(**fields: object) -> dict[str, str]:
        placement = PlacementSection(env={"OMP_NUM_THREADS": "7"} if fields.pop("own", 0) else {})
        return process_env(
            PoolSection(engine=EngineConfig(model_path="m", **fields), placement=placement)
        )

    assert env(num_threads=2)["OMP_NUM_THREADS"] == env(num_threads=2)["MKL_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in env()
    assert env(num_threads=2, own=1)["OMP_NUM_THREADS"] == "7"


def test_only_ranks_of_one_worker_see_each_others_gpus() -> None:
    def env(tp_size: int, gpus: float) -> dict[str, str]:
        engine = EngineConfig(model_path="m", device="cuda" if gpus else "cpu", tp_size=tp_size)
        return process_env(PoolSection(engine=engine, placement=PlacementSection(gpus=gpus)))

    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert env(2, 1)[name] == "1"
    assert name not in env(1, 1)
    assert name not in env(2, 0)


@pytest.mark.parametrize(
    ("gpu", "visible", "index"),
    [
        ("3", None, 3),
        ("3", "", 3),
        ("3", "3", 0),
        ("5", "2,3,5,7", 2),
        ("GPU-b2", "GPU-a1,GPU-b2", 1),
    ],
)
def test_a_gpu_by_its_number_in_this_process(gpu: str, visible: str | None, index: int) -> None:
    assert gpu_index([gpu], visible) == index


def test_bundle_of_a_rank() -> None:
    config = ClusterConfig(model=ModelSection(name="m"))
    assert config.prefill.placement.bundle() == {"CPU": 1.0}
    assert PlacementSection(cpus=0, gpus=0.5).bundle() == {"GPU": 0.5}


def test_a_python_at_a_path_with_spaces_is_quoted_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/plain/python")
    assert runtime_env({"A": "b"}) == {"env_vars": {"A": "b"}}
    monkeypatch.setattr("sys.executable", "/my venv/python")
    assert runtime_env({}) == {"env_vars": {}, "py_executable": "'/my venv/python'"}
