"""What the hand-offs of a worker tell its schedulers, and what they are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from concurrency.event_loop import Tasks
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import Commit, Ticket
from tests.support.submits import KEY
from worker_runtime.control.transfers import Transfers
from worker_runtime.scheduling.messages import AnnounceCommit, Committed, HandoffEnded
from worker_runtime.step_loop import Inbox


def test_a_notice_of_a_commit_counts_from_when_it_leaves() -> None:
    """The launch that it is about may have taken long."""
    transfers, seconds = object.__new__(Transfers), []
    sender = SimpleNamespace(announce_commit=lambda key, in_s: seconds.append(in_s))
    transfers.handoffs = cast(Any, SimpleNamespace(sender=sender))
    transfers._clock = lambda: 10.02
    for at in (10.05, 10.01):
        transfers._send(AnnounceCommit(key=KEY, at=at))
    assert seconds == [pytest.approx(0.03), 0.0]


@pytest.mark.parametrize("token", [-1, 100])
async def test_a_token_that_no_model_has_ends_its_hand_off_and_returns_its_blocks(
    token: int,
) -> None:
    transfers, ended = object.__new__(Transfers), []

    async def end(key: RequestKey, released: bool, error: ErrorInfo) -> None:
        ended.append((key, released, error.param))

    transfers.handoffs = cast(Any, SimpleNamespace(receiver=SimpleNamespace(end=end)))
    transfers.loans = cast(Any, SimpleNamespace(ended=lambda key: None))
    transfers._inbox, transfers._tasks, transfers._vocab_size = Inbox(), Tasks(), 100
    ticket = Ticket(key=KEY, sender_epoch=1, receiver_epoch=2, num_blocks=1, lifetime_s=9.0)
    fields = {"ticket": ticket, "generation": 1, "num_pieces": 0, "num_blocks": 0, "checksum": 0}
    for tokens in ((99, 0), (5, token)):
        transfers.committed(KEY, Commit(key=KEY, tokens=tokens, **fields))
    await asyncio.sleep(0)
    good, bad = transfers._inbox.drain()
    assert good == Committed(key=KEY, tokens=(99, 0))
    assert (type(bad), bad.error.param) == (HandoffEnded, "tokens")
    assert ended == [(KEY, False, "tokens")]
