"""Backends under test."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kv_transfer.backends.base import Backend
from kv_transfer.backends.tcp import TcpBackend
from tests.support.memory_links import MemoryBackend, MemoryHub
from tests.support.one_sided import OneSidedBackend, OneSidedHub


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


RefuseThreads = Callable[[Callable[[str], bool]], None]


@pytest.fixture
def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> RefuseThreads:
    """Let no thread start whose name a function is true of."""

    def use(refused: Callable[[str], bool]) -> None:
        def few(thread: threading.Thread) -> None:
            if refused(thread.name):
                raise RuntimeError("can't start new thread")
            start(thread)

        start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", few)

    return use


def _backends(kind: str) -> Callable[[], Backend]:
    hub, pools = MemoryHub(), OneSidedHub()
    makers: dict[str, Callable[[], Backend]] = {
        "memory": lambda: MemoryBackend(hub),
        "tcp": lambda: TcpBackend("127.0.0.1"),
        "one-sided": lambda: OneSidedBackend(pools),
    }
    return makers[kind]


@pytest.fixture(params=["memory", "tcp"])
def backends(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes backends that can reach each other."""
    return _backends(request.param)


@pytest.fixture(params=["memory", "tcp", "one-sided"])
def any_backends(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Those with which the sender writes into decode's pool by itself, too."""
    return _backends(request.param)


@pytest.fixture
def memory() -> Callable[[], Backend]:
    return _backends("memory")
