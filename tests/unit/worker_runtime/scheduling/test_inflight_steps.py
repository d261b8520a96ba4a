"""How long the steps in flight are sure to last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from protocol.ids import RequestKey
from protocol.messages import Submit
from tests.support.engine import GREEDY
from worker_runtime.scheduling.inflight_steps import InflightSteps, Row
from worker_runtime.scheduling.sequence import Sequence


def launched_rows(flight: InflightSteps[Any], counts: list[int], now: float) -> None:
    """A step in which each sequence runs so many tokens."""

    @dataclass
    class Entry:
        sequence: Sequence

    rows = []
    for count in counts:
        submit = Submit(
            key=RequestKey("a"),
            router_id="r",
            prompt_ids=(1,) * count,
            sampling=GREEDY,
            time_left_s=1e12,
        )
        rows.append(Row(Entry(Sequence.from_submit(submit, 0.0)), count, False, []))
    assert flight.launch(rows, now) is not None


def after_steps(flight: InflightSteps[Any], count: int, real_s: Callable[[int], float]) -> float:
    """Run `count` steps of 256 to 319 prompt tokens the way the step loop does: it looks at a step
    no sooner than `remaining_s` says. Returns the time; steps last `real_s(tokens)`."""
    now = 10.0
    for number in range(count):
        tokens = 256 + number % 64
        launched_rows(flight, [tokens], now)
        now += max(flight.remaining_s(now), real_s(tokens))
        flight.land(now)
    return now


def test_a_step_with_prompts_is_sure_to_last_a_share_of_what_is_predicted() -> None:
    flight: InflightSteps[Any] = InflightSteps()
    assert flight.remaining_s(0.0) == 0.0
    launched_rows(flight, [1000], 10.0)
    assert flight.remaining_s(10.0) == 0.0  # the speed of this device is not known yet
    flight.land(10.02)
    now = after_steps(flight, 50, lambda tokens: 0.005 + tokens * 20e-6) + 1.0
    launched_rows(flight, [300], now)
    assert flight.remaining_s(now) == pytest.approx(0.75 * 0.011, rel=0.05)
    assert flight.ends_at == pytest.approx(now + 0.011, abs=0.0005)
    launched_rows(flight, [300], now + 0.001)
    assert flight.ends_at == pytest.approx(now + 0.022, abs=0.001)
    flight.land(now + 0.014)  # later than predicted: so is what follows
    launched_rows(flight, [300], now + 0.015)
    assert flight.ends_at == pytest.approx(now + 0.036, abs=0.001)


@pytest.mark.parametrize("stall_s", [0.025, 0.6, 5.0])
@pytest.mark.parametrize("before", [0, 2, 7, 40])
def test_a_stall_does_not_slow_the_steps_behind_it(stall_s: float, before: int) -> None:
    """A kernel is compiled, the host pauses: such a step must not make later ones seem long, or the
    loop would look late and find that they were."""
    flight: InflightSteps[Any] = InflightSteps()
    after_steps(flight, before, lambda tokens: 0.005 + tokens * 10e-6)
    launched_rows(flight, [4], 5.0)
    flight.land(5.0 + stall_s)
    after_steps(flight, 20, lambda tokens: 0.005 + tokens * 10e-6)
    took = after_steps(flight, 20, lambda tokens: 0.005 + tokens * 10e-6) - 10.0
    assert took <= 20 * 0.0085


def test_a_step_of_decoding_sequences_lasts_as_long_as_the_last_ones_did() -> None:
    flight: InflightSteps[Any] = InflightSteps()
    now = 1.0
    for milliseconds in (5, 5, 9, 1, 5):  # the host looked late once: one seems long, one short
        launched_rows(flight, [1] * 8, now)
        assert flight.remaining_s(now) == 0.0  # too few to tell
        now += milliseconds / 1000
        flight.land(now)
    launched_rows(flight, [1] * 8, now)
    assert flight.remaining_s(now + 0.001) == pytest.approx(0.008)
    flight.land(now + 0.005)
    for _ in range(9):
        launched_rows(flight, [1] * 8, now)
        now += 0.005
        flight.land(now)
    launched_rows(flight, [1] * 8, now)
    assert flight.remaining_s(now) == pytest.approx(0.005)
    flight.land(now + 0.005)
    launched_rows(flight, [1] * 4, 9.0)
    assert flight.remaining_s(9.0) == pytest.approx(
        0.0025
    )  # fewer rows: it may be that much shorter
    flight.land(9.005)
    launched_rows(flight, [1] * 16, 9.005)
    assert flight.remaining_s(9.005) == pytest.approx(0.005)


def test_the_times_of_the_device_are_relied_on_more_than_those_the_loop_saw() -> None:
    """The loop looks 3 ms late at each step; the device says how long it took."""
    flight: InflightSteps[Any] = InflightSteps()
    now = 10.0
    for number in range(60):
        tokens = 256 + number % 64
        took = 0.005 + tokens * 20e-6
        launched_rows(flight, [tokens], now)
        now += took + 0.003
        flight.land(now, took)
    launched_rows(flight, [300], now)
    assert flight.remaining_s(now) == pytest.approx(0.97 * 0.011, rel=0.02)
    flight.land(now + 0.014, 0.011)
    for _ in range(6):
        launched_rows(flight, [1] * 8, now)
        now += 0.008
        flight.land(now, 0.005)
    launched_rows(flight, [1] * 8, now)
    assert flight.remaining_s(now) == pytest.approx(0.97 * 0.005)
    flight.land(now + 0.008, 0.005)


def test_a_clock_that_is_set_back_holds_up_no_step() -> None:
    flight: InflightSteps[Any] = InflightSteps()
    after_steps(flight, 10, lambda tokens: 0.1)
    launched_rows(flight, [300], 7200.0)
    assert flight.remaining_s(7200.0) == pytest.approx(0.075, rel=0.01)
    assert flight.remaining_s(3600.0) == 0.0  # two hours have not begun again
    flight.land(3600.0)
    assert 0.0 < flight.tokens_per_second() < 1e6
