"""Divides the cores of a machine among its workers that have work now.

On one host prefill and decode often take turns, and the one that computes may use every core. When
both compute, more threads than cores are far worse than fewer, because threads of a parallel region
wait for each other: beside one busy process a decode step on two cores took 27 ms with one thread
and 82 ms with two. So a step takes cores / (workers with work) threads, and fewer while other
processes compute.
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

#: A thread that only delivers a message runs shorter than this.
_MOMENT_S = 0.0003
#: Two changes of a folder within this time may show the same modification time.
_TICK_NS = 50_000_000


def shared_folder() -> Path:
    """Folder of the lock files of this user's workers on this machine."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}" / "cores"


class BusyWorkers:
    """Workers with work: each holds a lock on a file of its own in one folder, which ends with its
    process. Used from one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._join()
        self._others: dict[str, int] = {}
        self._listed = -1
        self._busy = False

    def _join(self) -> None:
        """Add a file for this worker; always a new one, as others may have an old one open."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def begin(self) -> None:
        """This worker has work. While another one probes the lock this has no effect until the next
        call: it does not block, as that process may be frozen."""
        if not self._busy:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._busy = True

    def end(self) -> None:
        if self._busy:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._busy = False

    def others(self) -> int:
        self._list()
        return sum(map(_is_locked, self._others.values()))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        for file in (self._file, *self._others.values()):
            os.close(file)
        self._others = {}

    def _list(self) -> None:
        """Open the files of new workers, when the folder has changed."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            changed = -1
        if changed == self._listed != -1:
            return
        if not self._path.exists():  # removed by a cleaner of temporary files
            os.close(self._file)
            self._join()
            self._busy = False
            self.begin()
        # Modification times are coarse: a file added now may not change it again.
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
    """Chooses the number of threads of this worker's next step. Owned by the step thread once that
    runs."""

    def __init__(
        self,
        folder: Path | None = None,
        num_cores: int | None = None,
        runnable: Callable[[], int] | None = None,
    ) -> None:
        """`runnable`: counts the threads of the machine that run or wait for a core."""
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._workers = BusyWorkers(folder or shared_folder())
        self._runnable = runnable or _runnable_threads
        self._num_threads = 0

    def claim(self) -> None:
        """This worker has work: others leave it a share of the cores."""
        self._workers.begin()

    def take(self) -> int:
        """Number of threads for the step about to run."""
        self.claim()
        num_threads = max(1, self._num_cores // (1 + self._workers.others()))
        if num_threads > 1:
            num_threads = max(1, min(num_threads, self._num_cores - self._foreign_threads()))
        self._num_threads = num_threads
        return num_threads

    def release(self) -> None:
        self._workers.end()

    def close(self) -> None:
        self._workers.close()

    def _foreign_threads(self) -> int:
        """Threads of other processes that keep a core busy: the fewest of three counts, so that one
        that wakes for a moment is left out. Threads of this worker's last step still spin."""
        fewest = self._num_cores
        for wait_s in (0.0, _MOMENT_S, _MOMENT_S):
            if wait_s:
                time.sleep(wait_s)
            fewest = min(fewest, max(0, self._runnable() - max(1, self._num_threads)))
            if fewest == 0:
                break
        return fewest


def _runnable_threads() -> int:
    """Count of the kernel; 0 where it is not known."""
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
