"""The two clocks a hand-off needs, injected so that tests can turn them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`monotonic` times leases and operations; `wall` is put into spans."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
