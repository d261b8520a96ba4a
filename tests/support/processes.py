"""Child processes, forked from one server that has imported torch and all that they run once, and
told what to do over a pipe."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

_PRELOADED = [
    "pytest",
    "tests.support.chaos_host",
    "tests.support.pair",
    "tests.support.rank_process",
    "tests.support.transfer_process",
]


def forks() -> ForkServerContext:
    """The context whose processes start in milliseconds, with no thread or lock of the parent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class Child:
    """The parent's end of a process whose main function is `target(*args, pipe)`, which `obey`s.
    With a `context` of its own it may have children, and has to be killed."""

    ANSWER_S = 100.0

    def __init__(
        self, target: Callable[..., None], *args: Any, context: BaseContext | None = None
    ) -> None:
        made = context or forks()
        self._pipe, other = made.Pipe()
        self.process: Any = made.Process(  # type: ignore[attr-defined]
            target=target, args=(*args, other), daemon=context is None
        )
        self.process.start()
        other.close()
        self._numbers = itertools.count(1)
        self._answers: dict[object, Future[Any]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, name: str, *args: Any) -> Future[Any]:
        """Begin a command; its answer."""
        number = next(self._numbers)
        answer = self.told(number)
        self._pipe.send((number, name, args))
        return answer

    def told(self, what: object) -> Future[Any]:
        """What the process says of itself under this name."""
        return self._answers.setdefault(what, Future())

    def do(self, name: str, *args: Any) -> Any:
        """Run a command."""
        return self.start(name, *args).result(self.ANSWER_S)

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):  # it ended since, and was reaped
                os.kill(self.process.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)

    def _listen(self) -> None:
        try:
            while True:
                what, result = self._pipe.recv()
                answer = self.told(what)
                with suppress(InvalidStateError):  # it came before, or its wait was cancelled
                    if isinstance(result, Exception):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)
        except (EOFError, OSError):
            for answer in list(self._answers.values()):
                with suppress(InvalidStateError):
                    answer.set_exception(BrokenPipeError("the child is gone"))


def open_sockets() -> int:
    """How many this process has."""
    return sum("socket:" in _target(fd) for fd in os.listdir("/proc/self/fd"))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


async def obey(host: object, pipe: Connection) -> None:
    """Run the methods of `host` that the parent names, all at once, until it hangs up; then the
    process ends. What comes back carries the command's number."""
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    closed = asyncio.Event()

    async def answer(number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            result = await getattr(host, name)(*args)
        except Exception as error:  # noqa: BLE001 - it is the parent's to judge
            result = error
        pipe.send((number, result))

    def start(command: tuple[int, str, tuple[Any, ...]]) -> None:
        task = loop.create_task(answer(*command))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(start, pipe.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read, daemon=True).start()
    await closed.wait()
    os._exit(0)


def alive(pid: int) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def usage_of(pid: int) -> dict[str, float] | None:
    """Resources of a process; None when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
        value = {line.partition(":")[0]: line.split()[1:] for line in status.splitlines()}
        mib = int(value["VmRSS"][0]) / 1024
    except (OSError, KeyError):  # a process that is ending has no memory any more
        return None
    return {"mib": round(mib), "threads": int(value["Threads"][0]), "files": files}
