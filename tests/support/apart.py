"""Run functions in separate, fresh processes within a time limit."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

#: A function that the processes can import, and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*args), None))
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send((None, traceback.format_exc()))


def apart(calls: Sequence[Call], timeout_s: float) -> list[Any]:
    """The result of each call, once every process has ended by itself.

    All are killed as soon as one raises or dies, or when the time is up. They are spawned, not
    forked: torch numbers the exchanges of symmetric memory by process, so that a group cannot form
    between a process that was in another group before and one that was not.
    """
    deadline = time.monotonic() + timeout_s
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, int] = {}
    processes = []
    try:
        for number, call in enumerate(calls):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, *call))
            process.start()
            theirs.close()
            pipes[mine] = number
            processes.append(process)
        results: list[Any] = [None] * len(calls)
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"calls {sorted(pipes.values())} took more than {timeout_s} s"
            for pipe in ready:
                number = pipes.pop(pipe)
                results[number], error = pipe.recv()  # EOFError: it died
                assert error is None, f"call {number}: {error}"
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return results
    finally:
        for process in processes:
            process.kill()
