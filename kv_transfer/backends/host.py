"""Which process of which host a worker is: processes share GPU memory under one kernel only."""

from __future__ import annotations

import os
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
    """This process, to be advertised to peers: host, PID namespace, PID, start time; empty when
    unknown."""
    host = host_id()
    try:
        started, namespace = _start_time(os.getpid()), _PID_NAMESPACE.readlink()
    except OSError:
        return ""
    return f"{host}|{namespace}|{os.getpid()}|{started}" if host else ""


def is_near(endpoint: str) -> bool:
    """Whether the pool behind an endpoint of cuda_ipc, `host id|...`, lies on this host."""
    host = host_id()
    return host != "" and endpoint.partition("|")[0] == host


def may_share_host(process: str) -> bool:
    """Whether a process (process_id) may run on this host: unless it surely does not."""
    return process == "" or host_id() == "" or is_near(process)


def has_ended(process: str) -> bool:
    """Whether a process (process_id) of this host has surely ended."""
    mine = process_id()
    if not mine or mine.split("|")[:2] != process.split("|")[:2]:
        return False  # it cannot be seen from here
    _, _, pid, started = process.split("|")
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
