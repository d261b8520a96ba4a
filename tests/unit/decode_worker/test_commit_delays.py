"""How long after its announced time a commit is expected."""

from __future__ import annotations

import pytest

from decode_worker.commit_delays import _MAX_DELAY_S, _MIN_SEEN, _UNMEASURED_S, CommitDelays


def delays_of(*seen: tuple[int, float]) -> CommitDelays:
    delays = CommitDelays()
    for num_tokens, seconds in seen:
        delays.add(num_tokens, seconds)
    return delays


LINE = [(tokens, 0.002 + 1e-6 * tokens) for tokens in range(100, 4100, 500)]


@pytest.mark.parametrize(
    ("seen", "tokens", "expected"),
    [
        (LINE[: _MIN_SEEN - 1], 4000, _UNMEASURED_S),
        (LINE, 0, 0.002),
        (LINE, 4000, 0.006),
        (LINE, 10**6, _MAX_DELAY_S),
        ([*LINE, (100, 2 * _MAX_DELAY_S), (100, -1.0)], 4000, 0.006),  # says nothing about others
        ([(400, 0.001), (400, 0.003)] * 4, 4000, 0.002),  # of one length
        ([(400, 0.001), (410, 0.003)] * 32, 4000, 0.002),  # too much alike to tell
        ([(0, 0.002), (16, 0.001)] * 4, 4000, 0.0015),
        ([(tokens, -0.001) for tokens, _ in LINE], 100, 0.0),  # predictions are too late
    ],
)
def test_delays_are_the_line_through_the_last_commits(seen, tokens, expected):
    assert delays_of(*seen).expected_s(tokens) == pytest.approx(expected, abs=1e-9)


def test_what_holds_now_replaces_what_held_before():
    later = [(tokens, 0.001) for tokens, _ in LINE] * 8
    assert delays_of(*LINE, *later).expected_s(4000) == pytest.approx(0.001)
