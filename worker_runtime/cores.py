"""Divides a machine's cores among the workers on it that have work right now.

On one host prefill and decode often take turns: while one waits, the other may use every core. But
when both compute, more threads than cores are much worse than fewer, because the threads of a
parallel region wait for each other: beside one busy process, a decode step on two cores took 27 ms
with one thread and 82 ms with two. So each step takes cores / (workers with work) threads, and
fewer while anybody else computes.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Seconds after which a thread that only delivers a message is gone again.
_MOMENT_S = 0.0003
#: More than two changes of a folder can be apart and still show the same time.
_TICK_NS = 50_000_000


def shared_folder() -> Path:
    """Where this user's workers on this machine find each other."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / "cores"


class BusyWorkers:
    """Who has work: a locked file a worker in one folder. The lock ends with its process, however
    that ends. Used from one thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._others: dict[str, int] = {}
        self._listed = -1
        self._busy = False

    def begin(self) -> None:
        """This worker has work. While another looks, it is not said before the next call: that
        process may be frozen."""
        if not self._busy:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._busy = True

    def end(self) -> None:
        """This worker waits for work."""
        if self._busy:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._busy = False

    def others(self) -> int:
        """How many other workers have work."""
        self._list()
        return sum(map(_is_locked, self._others.values()))

    def close(self) -> None:
        """Leave for good."""
        self._path.unlink(missing_ok=True)
        for file in (self._file, *self._others.values()):
            os.close(file)
        self._others = {}

    def _list(self) -> None:
        """Look who came and went, when the folder has changed."""
        changed = self._folder.stat().st_mtime_ns
        if changed == self._listed:
            return
        # Times of files are coarse: one that comes at the same moment may not change them again.
        self._listed = changed if time.time_ns() - changed > _TICK_NS else -1
        paths = {path.name: path for path in self._folder.iterdir() if path != self._path}
        for name in self._others.keys() - paths.keys():
            os.close(self._others.pop(name))
        for name in paths.keys() - self._others.keys():
            if not _is_alive(name):
                paths[name].unlink(missing_ok=True)
                continue
            try:
                self._others[name] = os.open(paths[name], os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue


class SharedCores:
    """Says how many threads this worker's next step takes. Once the step thread runs, all methods
    are its own."""

    def __init__(
        self,
        folder: Path | None = None,
        num_cores: int | None = None,
        runnable: Callable[[], int] | None = None,
    ) -> None:
        """`runnable`: threads of the whole machine that run or wait for a core."""
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._workers = BusyWorkers(folder or shared_folder())
        self._runnable = runnable or _runnable_threads
        self._num_threads = 0

    def claim(self) -> None:
        """There is work now: other workers leave a share to this one."""
        self._workers.begin()

    def take(self) -> int:
        """A step is about to run: how many threads it is to take."""
        self.claim()
        num_threads = max(1, self._num_cores // (1 + self._workers.others()))
        if num_threads > 1:
            num_threads = max(1, min(num_threads, self._num_cores - self._foreign_threads()))
        self._num_threads = num_threads
        return num_threads

    def release(self) -> None:
        """Nothing can run now."""
        self._workers.end()

    def close(self) -> None:
        """No step will run any more."""
        self._workers.close()

    def _foreign_threads(self) -> int:
        """Threads of others that keep a core busy; one that just wakes for a moment does not count.
        Ours of the last step spin for a while, and are among those that run."""
        least = self._num_cores
        for wait_s in (0.0, _MOMENT_S, _MOMENT_S):
            if wait_s:
                time.sleep(wait_s)
            least = min(least, max(0, self._runnable() - max(1, self._num_threads)))
            if least == 0:
                break
        return least


def _runnable_threads() -> int:
    """As the kernel counts them at this moment; 0 where it does not tell."""
    try:
        text = Path("/proc/loadavg").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.split()[3].partition("/")[0])


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _is_alive(name: str) -> bool:
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return True
    return True
