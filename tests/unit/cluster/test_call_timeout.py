"""Calls into a Ray that hangs end within their limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.call_timeout import call_with_timeout
from cluster.cli import session
from cluster.config.schema import ClusterConfig, LifecycleSection, ModelSection
from cluster.local.local_ray import RunningCluster
from cluster.membership import directory
from cluster.membership.table import Pool
from cluster.serve import control, deployments
from protocol.errors import Unavailable

Hang = Any


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """A call that returns only after the test."""
    over = threading.Event()
    for module in (deployments, directory, control, session):
        monkeypatch.setattr(module, "ANSWER_S", 0.0)
    yield lambda *_, **__: over.wait()
    over.set()


def test_the_call_returns_raises_or_times_out(hang: Hang) -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    assert call_with_timeout(60.0, "nothing came", lambda: 7) == 7
    with pytest.raises(TimeoutError, match="its own"):
        call_with_timeout(60.0, "nothing came", fail)
    with pytest.raises(Unavailable, match=r"^nothing came within 0 s$"):
        call_with_timeout(0.0, "nothing came", hang)


def test_connecting_to_a_ray_that_hangs(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", hang)
    with pytest.raises(Unavailable, match="the Ray cluster at auto did not answer within 0 s"):
        session.connect(RunningCluster(address="auto", token="", config="c"))


def test_connecting_keeps_the_sigterm_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client installs its own, which reports a crash."""
    handlers: list[tuple[int, object]] = []
    monkeypatch.setattr("ray.init", lambda *_, **__: None)
    monkeypatch.setattr(session.signal, "signal", lambda *handler: handlers.append(handler))
    session.connect(RunningCluster(address="auto", token="", config="c"))
    assert handlers == [(signal.SIGTERM, signal.getsignal(signal.SIGTERM))]


def test_a_failed_connection_keeps_the_sigterm_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    handlers: list[tuple[int, object]] = []
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(session.signal, "signal", lambda *handler: handlers.append(handler))
    with pytest.raises(Unavailable, match="does not answer: connection refused"):
        session.connect(RunningCluster(address="auto", token="", config="c"))
    assert handlers == [(signal.SIGTERM, signal.getsignal(signal.SIGTERM))]


def test_disconnecting_from_a_ray_that_hangs(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SHUTDOWN_S", 0.0)
    monkeypatch.setattr("ray.shutdown", hang)
    session.disconnect()


def test_queries_of_a_ray_that_hangs(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_actor", hang)
    monkeypatch.setattr("ray.nodes", hang)
    with pytest.raises(Unavailable, match="did not find the directory within"):
        directory.find_directory()
    with pytest.raises(Unavailable, match="did not find Ray Serve's controller within"):
        control.pool_statuses()
    with pytest.raises(Unavailable, match="did not say which nodes it has within"):
        deployments.nodes()


@pytest.mark.parametrize("what", ["start", "run_many"])
def test_a_serve_that_hangs(what: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all applications, and for a pool that is created by scaling."""
    serve = SimpleNamespace(
        **{"start": lambda **_: None, "run_many": lambda *_, **__: None, what: hang}
    )
    monkeypatch.setattr(deployments, "serve", serve)
    monkeypatch.setattr(deployments, "application", lambda *_, **__: None)
    monkeypatch.setattr(deployments, "pool_statuses", dict)
    monkeypatch.setattr(deployments, "check_resources", lambda *_: None)
    monkeypatch.setattr(deployments, "nodes", list)
    monkeypatch.setattr(deployments, "set_replicas", lambda *_: False)
    times = LifecycleSection(start_timeout_s=0.001)
    config = ClusterConfig(model=ModelSection(name="m"), lifecycle=times)
    with pytest.raises(Unavailable, match="Ray Serve did not take the applications within"):
        deployments.deploy(config, b"secret")
    with pytest.raises(Unavailable, match="Ray Serve did not take the applications within"):
        deployments.scale(config, {Pool.PREFILL: 1})


def test_an_interrupt_waits_for_the_running_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray aborts a process that exits during a call."""
    over = threading.Event()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    def work() -> None:
        time.sleep(0.1)
        over.set()

    monkeypatch.setattr("concurrency.threads.Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        call_with_timeout(30.0, "it did not end", work)
    assert over.is_set()
