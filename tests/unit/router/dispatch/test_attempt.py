"""What one attempt takes of its workers' events, and for whom it waits."""

from __future__ import annotations

import time

import pytest

from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import ScoreEvent, TokenEvent
from protocol.states import FinishReason
from router.dispatch.attempt import Attempt, AttemptOutcome, TokenMerger


class Noted:
    """An output that only notes what it is given."""

    def __init__(self) -> None:
        self.events: list[TokenEvent | ScoreEvent] = []

    def take(self, event: TokenEvent) -> bool:
        self.events.append(event)
        return False

    def score(self, event: ScoreEvent) -> None:
        self.events.append(event)


async def test_what_comes_after_the_end_of_an_attempt_is_not_taken() -> None:
    """Also not of a prompt's scores: the next attempt brings them again."""
    key, output = RequestKey("r", 0), Noted()
    merger = TokenMerger()
    attempt = Attempt(key, merger=merger, output=output, remote=True, holder="d", clock=time.time)
    attempt.on_lost(WorkerRef(worker_id="p", epoch=1, role=Role.PREFILL, address="x"), "gone")
    ended = attempt.result()
    attempt.on_token(TokenEvent(key=key, index=0, token=30), Role.DECODE)
    late = ScoreEvent(key=key, start=0, logprobs=(), finish=FinishReason.LENGTH)
    attempt.on_event(late, WorkerRef(worker_id="d", epoch=2, role=Role.DECODE, address="y"))
    assert (output.events, merger.output_ids) == ([], [])
    assert attempt.result() is ended
    assert ended is not None
    assert ended.outcome is AttemptOutcome.LOST


@pytest.mark.parametrize("remote", [False, True])
async def test_only_an_output_with_a_prefill_worker_waits_for_its_spans(remote: bool) -> None:
    key, merger = RequestKey("r", 0), TokenMerger()
    attempt = Attempt(
        key, merger=merger, output=Noted(), remote=remote, holder="d", clock=time.time
    )
    assert attempt.prefill_reported.is_set() is not remote
