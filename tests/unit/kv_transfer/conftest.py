"""Backends under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kv_transfer.backends.base import Backend
from kv_transfer.backends.gloo import GlooBackend
from tests.support.memory_links import MemoryBackend, MemoryHub


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["memory", "gloo"])
def backends(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes backends that can reach each other."""
    if request.param == "gloo":
        return lambda: GlooBackend("127.0.0.1")
    hub = MemoryHub()
    return lambda: MemoryBackend(hub)


@pytest.fixture
def memory() -> Callable[[], Backend]:
    hub = MemoryHub()
    return lambda: MemoryBackend(hub)
