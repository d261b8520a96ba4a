"""Sharing a machine's cores between the workers that have work."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_runtime.cores import BusyWorkers, SharedCores


def test_a_worker_alone_takes_every_core_and_two_halve_them(tmp_path: Path) -> None:
    first, second = (SharedCores(tmp_path, 8, lambda: 0) for _ in range(2))
    assert first.take() == 8
    assert second.take() == 4
    assert first.take() == 4
    second.release()
    assert first.take() == 8
    assert second.take() == 4
    assert first.take() == 4  # the second has work again
    first.close()
    second.close()


@pytest.mark.parametrize("removed", ["folder", "files"])
def test_workers_find_each_other_again_after_their_files_were_removed(
    tmp_path: Path, removed: str
) -> None:
    folder = tmp_path / "cores"
    first, second = (SharedCores(folder, 8, lambda: 0) for _ in range(2))
    assert [first.take(), second.take()] == [8, 4]
    for path in folder.iterdir():
        path.unlink()
    if removed == "folder":
        folder.rmdir()
    first.take()
    second.take()
    assert [first.take(), second.take()] == [4, 4]
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert len([path for path in files if path.startswith(str(folder))]) == 4  # each has two
    second.release()
    assert first.take() == 8
    for cores in (first, second):
        cores.close()
    assert list(folder.iterdir()) == []


def test_every_worker_has_a_thread_however_many_there_are(tmp_path: Path) -> None:
    workers = [SharedCores(tmp_path, 2, lambda: 0) for _ in range(5)]
    assert [worker.take() for worker in workers] == [2, 1, 1, 1, 1]
    for worker in workers:
        worker.close()
    assert list(tmp_path.iterdir()) == []


def test_threads_of_others_are_left_a_core_each(tmp_path: Path) -> None:
    runnable = 1  # this one
    cores = SharedCores(tmp_path, 4, lambda: runnable)
    assert cores.take() == 4
    runnable = 4  # our own four still spin
    assert cores.take() == 4
    runnable = 6
    assert cores.take() == 2
    runnable = 4  # our two, and two of others
    assert cores.take() == 2
    runnable = 40
    assert cores.take() == 1
    runnable = 1
    assert cores.take() == 4
    cores.close()


def test_a_thread_that_wakes_for_a_moment_costs_no_core(tmp_path: Path) -> None:
    counts = iter([3, 3, 1])
    cores = SharedCores(tmp_path, 2, lambda: next(counts))
    assert cores.take() == 2
    assert next(counts, None) is None
    cores.close()


def test_a_process_that_froze_while_it_looked_delays_no_other(tmp_path: Path) -> None:
    worker, other = BusyWorkers(tmp_path), BusyWorkers(tmp_path)
    with worker._path.open() as frozen:
        fcntl.flock(frozen, fcntl.LOCK_SH)
        worker.begin()
        assert other.others() == 0
    worker.begin()
    assert other.others() == 1
    worker.close()
    other.close()


def test_idle_and_closed_workers_do_not_count(tmp_path: Path) -> None:
    me, idle, gone = (BusyWorkers(tmp_path) for _ in range(3))
    gone.begin()
    assert me.others() == 1
    gone.close()
    assert me.others() == 0
    idle.begin()
    idle.begin()
    assert me.others() == 1
    idle.end()
    assert me.others() == 0
    me.close()
    idle.close()


def test_a_killed_worker_leaves_nothing_that_counts(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from worker_runtime.cores import BusyWorkers\n"
        "BusyWorkers(Path(sys.argv[1])).begin(); print('busy', flush=True); time.sleep(60)"
    )
    me = BusyWorkers(tmp_path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        assert me.others() == 1
        process.kill()
    assert me.others() == 0
    assert BusyWorkers(tmp_path).others() == 0
    assert (
        len(list(tmp_path.iterdir())) == 2
    )  # the dead one's file went when a new worker registered
    me.close()


def test_a_worker_that_comes_at_the_moment_of_a_look_is_seen(tmp_path: Path) -> None:
    first = BusyWorkers(tmp_path)
    times = tmp_path.stat().st_mtime_ns
    assert first.others() == 0
    second = BusyWorkers(tmp_path)
    second.begin()
    os.utime(tmp_path, ns=(times, times))  # the clock of the folder has not ticked
    assert first.others() == 1
    second.close()
    first.close()
