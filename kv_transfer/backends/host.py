"""Which process of which host a worker is: processes share GPU memory under one kernel only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def host_id() -> str:
    """What two processes share exactly when they run under one kernel; empty when unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def process_id() -> str:
    """This process: host, PID namespace, PID and start time; empty when unknown."""
    host = host_id()
    try:
        started, namespace = _start_time(os.getpid()), _PID_NAMESPACE.readlink()
    except OSError:
        return ""
    return f"{host}|{namespace}|{os.getpid()}:{started}" if host else ""


def worker_processes(ranks: Sequence[str]) -> str:
    """The processes (process_id) of a worker's ranks, rank 0 first, to be advertised to peers:
    `host|PID namespace|PID:start,PID:start`; empty when one is unknown or elsewhere."""
    places = {rank.rpartition("|")[0] for rank in ranks}
    if len(places) != 1 or "" in ranks:
        return ""
    named = dict.fromkeys(rank.rpartition("|")[2] for rank in ranks)
    return f"{places.pop()}|{','.join(named)}"


def is_near(endpoint: str) -> bool:
    """Whether the pool behind an endpoint of cuda_ipc, `host id|...`, lies on this host."""
    host = host_id()
    return host != "" and endpoint.partition("|")[0] == host


def may_share_host(processes: str) -> bool:
    """Whether a worker (worker_processes) may run on this host: unless it surely does not."""
    return processes == "" or host_id() == "" or is_near(processes)


def has_ended(processes: str) -> bool:
    """Whether all processes (worker_processes) of a worker of this host have surely ended."""
    return _can_be_seen(processes) and all(map(_ended, _ranks(processes)))


def has_followers(processes: str) -> bool:
    """Whether a process of a worker (worker_processes) other than rank 0's may run on this host."""
    return _can_be_seen(processes) and not all(map(_ended, _ranks(processes)[1:]))


def _can_be_seen(processes: str) -> bool:
    place, _, _ = process_id().rpartition("|")
    return place != "" and place == processes.rpartition("|")[0]


def _ranks(processes: str) -> list[str]:
    return processes.rpartition("|")[2].split(",")


def _ended(rank: str) -> bool:
    pid, _, started = rank.partition(":")
    try:
        return _start_time(int(pid)) != started
    except OSError:  # no file is left to look
        return False


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when it has ended. Raises OSError
    when that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, num_threads, started = fields[0], int(fields[17]), fields[19]  # see proc(5)
    # The first thread of a process may be a zombie while others run, or hang in a driver.
    return None if state in "ZX" and num_threads <= 1 else started
