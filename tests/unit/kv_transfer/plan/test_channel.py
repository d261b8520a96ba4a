"""What prefill makes of decode's answer to an announcement."""

from __future__ import annotations

import pytest

from kv_transfer.plan.channel import Reply
from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    Internal,
    StaleMessage,
    Unavailable,
)

LATE = HandoffFailed("too late", param="turn")
BROKEN = HandoffFailed("broken", param="incarnation")
REPLACED = StaleMessage("replaced", param="incarnation")


@pytest.mark.parametrize(
    ("error", "once", "again"),
    [
        (None, Reply.POSTED, Reply.POSTED),
        (LATE, Reply.LATE, Reply.OUTDATED),  # maybe by the try that was not answered
        (BROKEN, Reply.OUTDATED, Reply.OUTDATED),
        (REPLACED, Reply.OUTDATED, Reply.OUTDATED),
        (Internal("no"), Reply.REFUSED, Reply.UNCERTAIN),
    ],
)
def test_an_answer_means_less_after_a_try_without_one(
    error: BatonError | None, once: Reply, again: Reply
) -> None:
    assert Reply.of(error, uncertain=False) is once
    assert Reply.of(error, uncertain=True) is again


@pytest.mark.parametrize("error", [DeadlineExceeded, Unavailable])
def test_without_an_answer_receives_may_be_posted(error: type[BatonError]) -> None:
    for param in (None, "turn", "incarnation"):
        assert Reply.of(error("gone", param=param), uncertain=True) is Reply.UNCERTAIN
