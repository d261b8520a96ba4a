"""Deadlines on the monotonic clock; None: there is none."""

from __future__ import annotations

import time


def deadline_in(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def fits(wait_s: float, deadline: float | None) -> bool:
    """Whether a wait ends before the deadline."""
    return deadline is None or time.monotonic() + wait_s < deadline
