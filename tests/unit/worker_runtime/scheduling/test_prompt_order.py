"""In which order prompts are computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_runtime.scheduling.prompt_order import AIMS_S, WaitingPrompt, prompt_order


def ends(prompts: Sequence[WaitingPrompt], order: Sequence[int]) -> dict[int, float]:
    """When each prompt has its first token."""
    sums = itertools.accumulate(prompts[i].work_s for i in order)
    return dict(zip(order, sums, strict=True))


def kept(prompts: Sequence[WaitingPrompt], order: Sequence[int]) -> int:
    """Prompts in time, for each of the first two aims."""
    at = ends(prompts, order)
    return sum(at[i] <= prompts[i].due_s(aim) + 1e-9 for i in order for aim in (0, 1))


PROMPTS = st.lists(
    st.builds(
        WaitingPrompt,
        work_s=st.floats(0.001, 6.0),
        waited_s=st.floats(0.0, 8.0),
        promised_s=st.none() | st.floats(-1.0, 5.0),
        starved=st.booleans(),
    ),
    max_size=80,
)


@given(prompts=PROMPTS, start_s=st.floats(0.0, 1.0))
def test_each_prompt_has_one_place_and_starved_ones_the_first(
    prompts: list[WaitingPrompt], start_s: float
) -> None:
    order = prompt_order(prompts, start_s)
    assert sorted(order) == list(range(len(prompts)))
    starved = [i for i, prompt in enumerate(prompts) if prompt.starved]
    assert order[: len(starved)] == starved


@given(
    works=st.lists(st.floats(0.001, 0.02), min_size=1, max_size=10),
    promises=st.lists(st.none() | st.floats(0.2, 3.0), min_size=10, max_size=10),
)
def test_where_all_can_be_in_time_all_are(works: list[float], promises: list[float | None]) -> None:
    prompts = [
        WaitingPrompt(work_s, 0.0, promised_s)
        for work_s, promised_s in zip(works, promises, strict=False)
    ]
    order = prompt_order(prompts, 0.0)
    at = ends(prompts, order)
    assert all(at[i] <= prompts[i].due_s(0) for i in order)
    assert [prompts[i].due_s(0) for i in order] == sorted(prompts[i].due_s(0) for i in order)


def test_nearly_as_many_are_in_time_as_in_the_best_of_all_orders() -> None:
    source, ours, best, cases = random.Random(1), 0, 0, 300
    for _ in range(cases):
        waited = sorted(source.uniform(0.0, 0.6) for _ in range(source.randint(2, 5)))
        prompts = [WaitingPrompt(source.uniform(0.003, 0.3), each) for each in reversed(waited)]
        ours += kept(prompts, prompt_order(prompts, 0.0))
        orders = itertools.permutations(range(len(prompts)))
        best += max(kept(prompts, order) for order in orders)
    assert ours >= 0.95 * best


def test_a_large_prompt_gives_way_to_the_next_aim_and_is_in_time_for_that() -> None:
    """0.18 s of work came first; four of 0.05 s, just after it, could not wait for it."""
    prompts = [WaitingPrompt(0.18, 0.01), *[WaitingPrompt(0.05, 0.0) for _ in range(4)]]
    order = prompt_order(prompts, 0.0)
    assert order == [1, 2, 3, 4, 0]
    # By the same work, eight of them leave it no time for the aim after that either.
    more = [*prompts, *[WaitingPrompt(0.05, 0.0) for _ in range(8)]]
    assert prompt_order(more, 0.0)[:5] != [1, 2, 3, 4, 0]
    assert kept(more, prompt_order(more, 0.0)) >= 4 + 9


@pytest.mark.parametrize("promised_s", [0.2, 0.15])
def test_a_promise_gives_way_only_to_promises(promised_s: float) -> None:
    """It is larger than each of those that were promised nothing."""
    prompts = [*[WaitingPrompt(0.03, 0.0) for _ in range(6)], WaitingPrompt(0.1, 0.0, promised_s)]
    order = prompt_order(prompts, 0.0)
    assert ends(prompts, order)[6] <= promised_s
    # Another one that can be in time only without it takes its place.
    prompts += [WaitingPrompt(0.06, 0.0, 0.1), WaitingPrompt(0.06, 0.0, 0.15)]
    at = ends(prompts, prompt_order(prompts, 0.0))
    assert (at[7] <= 0.1, at[8] <= 0.15, at[6] <= promised_s) == (True, True, False)


def test_what_is_late_for_all_aims_comes_last_by_its_work() -> None:
    prompts = [
        WaitingPrompt(9.0, 6.0),
        WaitingPrompt(7.0, 0.0),
        WaitingPrompt(AIMS_S[0] / 2, 0.0),
        WaitingPrompt(6.0, 9.0, -4.9),
    ]
    assert prompt_order(prompts, 0.0) == [2, 3, 1, 0]
    waited = [WaitingPrompt(7.0, 10.0), WaitingPrompt(6.5, 1.0)]
    assert prompt_order(waited, 0.0) == [0, 1], "waiting makes up for work"
