"""Who waits for the start of a cluster leaves when the cluster is gone, and only then."""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import replace

import pytest

from cluster.cli import up as up_command
from cluster.cli.console import Console
from cluster.local_ray import RunningCluster


def test_a_start_ends_with_the_cluster_that_it_starts(monkeypatch, capsys):
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(up_command, "_LOOK_S", 0.01)
    monkeypatch.setattr(up_command.os, "_exit", exits.put)
    here = RunningCluster(address="h:1", token="", config="")
    with up_command._leaving_with(here, Console()), pytest.raises(queue.Empty):
        exits.get(timeout=0.1)
    gone = replace(here, pid=os.getpid(), started=-1)
    with up_command._leaving_with(gone, Console()):
        assert exits.get(timeout=10) == 1
    assert "the cluster was taken down meanwhile" in capsys.readouterr().err


def test_a_start_that_is_over_is_not_ended_by_a_last_look(monkeypatch):
    monkeypatch.setattr(up_command, "_LOOK_S", 0.01)
    looking, looked = threading.Event(), threading.Event()

    class Looked:
        @property
        def alive(self):
            looking.set()
            time.sleep(0.1)
            looked.set()
            return True

    with up_command._leaving_with(Looked(), Console()):
        assert looking.wait(10)
    assert looked.is_set()
