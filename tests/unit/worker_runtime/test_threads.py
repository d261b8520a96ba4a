"""Threads that leave no OpenMP team behind."""

from __future__ import annotations

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
