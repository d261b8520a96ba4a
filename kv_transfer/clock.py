"""The two clocks a hand-off needs, injected so that tests can turn them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`monotonic` times leases and operations; `wall` is compared with tickets and put into
    spans."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def until(self, wall_time: float) -> float:
        """The monotonic time at which the wall clock will show `wall_time`."""
        return self.monotonic() + (wall_time - self.wall())
