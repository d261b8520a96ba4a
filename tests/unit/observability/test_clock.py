"""The time of day as processes count it."""

from __future__ import annotations

import time

import pytest

from observability.clock import steady_clock


def test_it_begins_with_the_systems_clock_and_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"boot": 50.0, "day": 1_000.0}
    monkeypatch.setattr(time, "time", lambda: times["day"])
    monkeypatch.setattr(time, "clock_gettime", lambda _: times["boot"])
    clock = steady_clock()
    assert clock() == 1_000.0
    times |= {"boot": 53.0, "day": 9_000.0}
    assert clock() == 1_003.0
    assert steady_clock()() == 9_000.0
