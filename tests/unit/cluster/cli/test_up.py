"""`baton up` exits when its cluster ends during the start, and cleans up after interrupts."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from argparse import Namespace
from dataclasses import replace

import pytest

from cluster.cli import up as up_command
from cluster.cli.console import Console
from cluster.config.schema import ClusterConfig, ModelSection, NetworkSection
from cluster.local import local_ray
from cluster.local.local_ray import RunningCluster


def test_a_start_ends_with_the_cluster_that_it_starts(monkeypatch, capsys):
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(up_command, "_POLL_S", 0.01)
    monkeypatch.setattr(up_command.os, "_exit", exits.put)
    here = RunningCluster(address="h:1", token="", config="")
    with up_command._exit_with_head(here, Console()), pytest.raises(queue.Empty):
        exits.get(timeout=0.1)
    gone = replace(here, pid=os.getpid(), started=-1)
    with up_command._exit_with_head(gone, Console()):
        assert exits.get(timeout=60) == 1
    assert "the cluster was taken down meanwhile" in capsys.readouterr().err


def test_a_finished_start_is_not_ended_by_the_last_check(monkeypatch):
    monkeypatch.setattr(up_command, "_POLL_S", 0.01)
    looking, looked = threading.Event(), threading.Event()

    class Looked:
        @property
        def alive(self):
            looking.set()
            time.sleep(0.1)
            looked.set()
            return True

    with up_command._exit_with_head(Looked(), Console()):
        assert looking.wait(60)
    assert looked.is_set()


@pytest.fixture
def interruptible(tmp_path, monkeypatch):
    """Signals as a command has them; shells ignore SIGINT for background jobs."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["spawned", "claimed"])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_ray_is_spawned_leaves_nothing(moment, number, monkeypatch):
    heads: list[subprocess.Popen[bytes]] = []
    start, claim = subprocess.Popen, up_command._spawn_or_attach

    def spawn(_command, **options):
        heads.append(start(["sleep", "60"], **{**options, "env": None}))
        if moment == "spawned":
            signal.raise_signal(number)
        return heads[0]

    def claimed(*arguments):
        state = claim(*arguments)
        if moment == "claimed":
            signal.raise_signal(number)
        return state

    monkeypatch.setattr(local_ray.subprocess, "Popen", spawn)
    monkeypatch.setattr(up_command, "_spawn_or_attach", claimed)
    free = NetworkSection(http_port=0, grpc_port=0)
    config = ClusterConfig(model=ModelSection(name="m"), network=free)
    try:
        with pytest.raises(KeyboardInterrupt):
            up_command.bring_up(config, "c.yaml", Console())
        assert local_ray._session_processes(heads[0].pid) == []
        assert local_ray._read_state() is None
    finally:
        heads[0].kill()


@pytest.mark.usefixtures("interruptible")
def test_a_foreground_that_cannot_be_shown_is_stopped(monkeypatch):
    here, stopped = RunningCluster(address="h:1", token="", config=""), []

    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(up_command, "read_config", lambda *_, **__: None)
    monkeypatch.setattr(up_command, "bring_up", lambda *_: here)
    monkeypatch.setattr(up_command, "show_endpoints", gone)
    monkeypatch.setattr(up_command, "stop", lambda state, *_, now: stopped.append((state, now)))
    with pytest.raises(BrokenPipeError):
        up_command.run(Namespace(command="up", foreground=True, config="c.yaml"), Console())
    assert stopped == [(here, False)]
