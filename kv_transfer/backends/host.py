"""Whether two processes run under one kernel, and so may share GPU memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_id() -> str:
    """What two processes share exactly when they run under one kernel; empty when unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def is_near(endpoint: str) -> bool:
    """Whether the pool behind an endpoint of cuda_ipc, `host id|...`, lies on this host."""
    host = host_id()
    return host != "" and endpoint.partition("|")[0] == host
