"""Threads that leave no OpenMP team behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from concurrency.threads import run_in_thread
from kv_transfer.data.threads import await_callback, use_one_thread
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import byte_level


async def test_work_runs_in_a_thread_that_ends_with_it() -> None:
    seen: list[threading.Thread] = []

    def work() -> int:
        seen.append(threading.current_thread())
        return 42

    assert await run_in_thread(work) == 42
    seen[0].join(60)
    assert not seen[0].is_alive()
    assert seen[0] is not threading.main_thread()


async def test_its_error_is_raised_where_the_result_is_awaited() -> None:
    def work() -> int:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await run_in_thread(work)


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
    async with asyncio.timeout(60):
        assert await run_in_thread(lambda: 42) == 42
    assert given == [max(10, niceness)]


WORKER = """
import asyncio, os, sys, threading, time
from pathlib import Path

from decode_worker.scheduler import DecodeScheduler
from engine.config import EngineConfig
from engine.ranks.group import RankGroup
from kv_transfer.config import TransferConfig
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import Role
from worker_runtime.config import WorkerConfig
from worker_runtime.worker import Worker, WorkerSettings
from worker_runtime.ranks import follow_rank


def niceness():
    stats = (path.read_text() for path in Path("/proc/self/task").glob("*/stat"))
    return [int(stat.rpartition(")")[2].split()[16]) for stat in stats]


async def main():
    settings = WorkerSettings(
        worker_id="d",
        role=Role.DECODE,
        schedulers={Role.PREFILL: PrefillScheduler, Role.DECODE: DecodeScheduler},
        engine=EngineConfig(model_path=sys.argv[1], num_blocks=16, tp_size=int(sys.argv[2])),
        worker=WorkerConfig(),
        transfer=TransferConfig(),
        secret=b"s" * 32,
    )
    group = None
    if settings.engine.tp_size > 1:
        group = RankGroup(2)
        rank = group.invite, 1, settings.engine, settings.transfer, settings.tiers
        threading.Thread(target=follow_rank, args=rank, daemon=True).start()
    worker = Worker(settings, group=group)
    await worker.start()
    end = time.monotonic() + 60
    while max(niceness()) > 0 and time.monotonic() < end:  # the last that has loaded may yet go
        await asyncio.sleep(0.05)
    print(*niceness(), flush=True)
    await worker.stop()


asyncio.run(main())
os._exit(0)  # the follower, else a process of its own, may still be in a call of torch
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities belong to processes")
@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="all have stepped back")
@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_no_thread_that_serves_has_the_priority_of_loading(tmp_path: Path, tp_size: str) -> None:
    model = save_tiny_llama(tmp_path, head_dim=64, intermediate_size=512, vocab_size=401)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    out = subprocess.run(
        [sys.executable, "-c", WORKER, model, tp_size],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout.split()
    assert len(out) >= 6  # the loop's, the steps', four that compute masks
    assert set(out) == {"0"}


async def test_a_thread_that_cannot_begin_leaves_no_waiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def setpriority(_which: int, _who: int, _priority: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", setpriority)
    with pytest.raises(OSError, match="Operation not permitted"):
        async with asyncio.timeout(60):
            await run_in_thread(lambda: 42)


async def test_a_value_that_comes_after_its_wait_was_cancelled_is_dropped() -> None:
    callbacks: list[Callable[[int], None]] = []
    failed: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: failed.append(context))
    waiting = asyncio.create_task(await_callback(callbacks.append))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    callbacks[0](5)
    assert await await_callback(lambda done: done(7)) == 7
    await asyncio.sleep(0)
    assert failed == []


def test_one_thread_here_changes_nothing_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inside: list[int] = []

    def copy() -> None:
        use_one_thread()
        inside.append(torch.get_num_threads())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    try:
        assert inside == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
