"""Time, injected: wall clock for deadlines and timelines that cross processes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds since the Unix epoch.
Clock = Callable[[], float]


def wall_clock() -> float:
    """Seconds since the Unix epoch."""
    return time.time()
