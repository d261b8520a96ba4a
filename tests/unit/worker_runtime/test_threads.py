"""Threads that leave no OpenMP team behind."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import torch

from kv_transfer.single_thread import use_one_thread
from worker_runtime.threads import in_own_thread


async def test_work_runs_in_a_thread_that_ends_with_it() -> None:
    seen: list[threading.Thread] = []

    def work() -> int:
        seen.append(threading.current_thread())
        return 42

    assert await in_own_thread(work) == 42
    seen[0].join(5)
    assert not seen[0].is_alive()
    assert seen[0] is not threading.main_thread()


async def test_its_error_is_raised_where_the_result_is_awaited() -> None:
    def work() -> int:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await in_own_thread(work)


@pytest.mark.parametrize("niceness", [0, 15])
async def test_a_process_of_low_priority_loads_too(
    niceness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def setpriority(_which: int, _who: int, priority: int) -> None:
        if priority < niceness:  # for which a user needs a right
            raise PermissionError(13, "Permission denied")
        given.append(priority)

    monkeypatch.setattr(os, "getpriority", lambda _which, _who: niceness)
    monkeypatch.setattr(os, "setpriority", setpriority)
    async with asyncio.timeout(20):
        assert await in_own_thread(lambda: 42) == 42
    assert given == [max(10, niceness)]


async def test_a_thread_that_cannot_begin_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def setpriority(_which: int, _who: int, _priority: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", setpriority)
    with pytest.raises(OSError, match="Operation not permitted"):
        async with asyncio.timeout(20):
            await in_own_thread(lambda: 42)


def test_one_thread_here_changes_nothing_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inside: list[int] = []

    def copy() -> None:
        use_one_thread()
        inside.append(torch.get_num_threads())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(5)
    try:
        assert inside == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
