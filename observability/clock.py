"""The time of day, for processes that run for months."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Seconds since the Unix epoch: as the system's clock shows them now, and from here on counted
    by one that nobody sets. Whoever sets the system's clock ends no request and prolongs none.
    Clocks of two processes do not compare to the second: no deadline travels as a time of day."""
    began = time.time() - _since_boot()
    return lambda: began + _since_boot()


def _since_boot() -> float:
    # Where there is one, the clock that goes on while the machine sleeps.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
