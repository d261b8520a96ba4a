"""Wall time without jumps."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Wall time at this call plus monotonic time since, in seconds since the Unix epoch: adjusting
    the system's clock cannot move a deadline. Not comparable across processes."""
    began = time.time() - _since_boot()
    return lambda: began + _since_boot()


def _since_boot() -> float:
    # Where available, the clock that includes the time a machine sleeps.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
