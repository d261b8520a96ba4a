"""Reservations, admission and the merge of two token streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Overloaded, Unavailable
from protocol.ids import RequestKey
from protocol.messages import TokenEvent
from protocol.states import FinishReason
from router.admission.limits import InflightLimits
from router.dispatch.attempt import TokenMerger
from router.workers.bookkeeping import Reservations

A, B = RequestKey("a"), RequestKey("b")


def counts(r: Reservations) -> tuple[int, int, int, int]:
    return r.in_flight, r.sequences, r.tokens, r.blocks


def test_an_attempt_counts_until_a_report_includes_it() -> None:
    r = Reservations()
    r.reserve(A, tokens=100, blocks=7)
    assert counts(r) == (1, 1, 100, 7)
    r.reported(4)
    r.submitted(A, 5)  # the worker's fifth command
    r.reported(4)  # acknowledged, but this report is older
    assert counts(r) == (1, 1, 100, 7)
    r.reported(5)
    assert counts(r) == (1, 0, 0, 0)
    r.computed(A)
    r.release(A)
    assert counts(r) == (0, 0, 0, 0)


def test_a_report_may_overtake_the_acknowledgement() -> None:
    r = Reservations()
    r.reserve(A, tokens=100, blocks=7)
    r.reported(5)
    assert counts(r) == (1, 1, 100, 7)
    r.submitted(A, 5)
    assert counts(r) == (1, 0, 0, 0)


def test_a_cancelled_attempt_is_taken_off_until_a_report_excludes_it() -> None:
    r = Reservations()
    r.reserve(A, tokens=100, blocks=7)
    r.submitted(A, 1)
    r.reported(1)
    r.release(A, cancel=True)
    assert counts(r) == (0, -1, -100, -7)
    r.cancelled([A], 2)
    r.reported(1)
    assert counts(r) == (0, -1, -100, -7)
    r.reported(2)
    assert counts(r) == (0, 0, 0, 0)


def test_an_attempt_cancelled_before_a_report_includes_it() -> None:
    r = Reservations()
    r.reserve(A, tokens=100, blocks=7)
    r.release(A, cancel=True)
    assert counts(r) == (0, 0, 0, 0)
    r.submitted(A, 1)
    r.cancelled([A], 2)
    r.reported(1)  # has taken the submit in, not the cancel
    assert counts(r) == (0, -1, -100, -7)
    r.reported(2)
    assert counts(r) == (0, 0, 0, 0)


def test_tokens_are_known_by_size() -> None:
    r = Reservations()
    r.reserve(A, tokens=7000, blocks=0)
    r.reserve(B, tokens=40, blocks=0)
    assert [r.tokens_up_to(size) for size in (5, 6, 12, 13)] == [0, 40, 40, 7040]


STEPS = ["reserve", "submitted", "reported", "computed", "release", "cancel", "cancelled"]


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from([A, B])), max_size=30))
def test_no_order_of_steps_leaks(steps: list[tuple[str, RequestKey]]) -> None:
    r, num_commands = Reservations(), 0
    for step, key in steps:
        num_commands += 1
        match step:
            case "reserve":
                r.reserve(key, tokens=10, blocks=1)
            case "reported":
                r.reported(num_commands // 2)
            case "submitted":
                r.submitted(key, num_commands)
            case "cancelled":
                r.cancelled([key], num_commands)
            case "cancel":
                r.release(key, cancel=True)
            case _:
                getattr(r, step)(key)
        assert -2 <= r.sequences <= 2
        assert 0 <= r.in_flight <= 2
    for key in (A, B):
        r.release(key, cancel=True)
    r.cancelled([A, B], num_commands)
    r.reported(num_commands)
    assert counts(r) == (0, 0, 0, 0)
    assert not r._entries
    assert not r._unreported


def token_event(index: int, token: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(key=RequestKey("r", 0), index=index, token=token, finish=finish)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), length=st.integers(1, 20))
def test_tokens_come_out_in_order_once_whatever_the_race(data: st.DataObject, length: int) -> None:
    events = list(range(length)) + data.draw(st.lists(st.integers(0, length - 1), max_size=10))
    order = data.draw(st.permutations(events))
    merger = TokenMerger()
    out = []
    for index in order:
        finish = FinishReason.LENGTH if index == length - 1 else None
        out += merger.add(token_event(index, 100 + index, finish))
    assert [event.token for event in out] == [100 + i for i in range(length)]
    assert [event.finish for event in out] == [None] * (length - 1) + [FinishReason.LENGTH]
    assert merger.output_ids == [100 + i for i in range(length)]


def test_a_new_attempt_forgets_what_was_early() -> None:
    merger = TokenMerger()
    merger.add(token_event(0, 10))
    merger.add(token_event(2, 99))
    merger.restart()
    assert merger.add(token_event(1, 11)) == [token_event(1, 11)]
    assert merger.output_ids == [10, 11]


async def test_admission_counts_sequences_and_says_when_to_come_back() -> None:
    admission = InflightLimits(limit=3, retry_after_s=2.0)
    with admission.enter(2):
        with pytest.raises(Overloaded) as caught, admission.enter(2):
            pass
        assert caught.value.retry_after_s == 2.0
        with admission.enter(1):
            assert admission.in_flight == 3
        assert admission.in_flight == 2
    assert admission.in_flight == 0


async def test_admission_once_closed() -> None:
    admission = InflightLimits(limit=3, retry_after_s=1.0)
    admission.close()
    with pytest.raises(Unavailable), admission.enter(1):
        pass
