"""Sequences that leave for another worker while they run: the sending half of a move."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.control.listeners import TransferReport
from protocol.errors import ErrorCode, HandoffFailed
from protocol.ids import RequestKey
from protocol.kv_layout import ONE_GROUP, KVGroup
from protocol.timeline import Phase
from tests.support.decode_bench import Bench, make_submit
from tests.support.paged import expected_output
from tests.support.scheduler_bench import BLOCK
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import (
    FAILED,
    MOVED,
    CommitHandoff,
    Delivered,
    EndHandoff,
    Granted,
    HandoffEnded,
    MoveOut,
    Push,
    RequestCancelled,
    Sent,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2]
TO = RequestKey("a", 1)
REPORT = TransferReport(num_bytes=1, num_pieces=1, start=5.0, end=6.0)


class Leaving(Bench):
    """A bench that keeps what the sender has to do, and the spans of what has left."""

    def __post_init__(self) -> None:
        self.sends: list[Any] = []
        self.spans: list[Any] = []
        super().__post_init__()

    def take(self, out: Any) -> None:
        super().take(out)
        self.sends += out.sends
        self.spans += [span for step in out.events.values() for span in step.spans]

    def taken(self) -> list[Any]:
        sends, self.sends = self.sends, []
        return sends


def started(depth: int = 1, *, num_tokens: int = 5, **options: Any) -> Leaving:
    """With a sequence that has sampled so many tokens, and its router knows all of them."""
    bench = Leaving(depth=depth, **options)
    bench.submit(make_submit("a", PROMPT, max_tokens=40))
    while len(bench.output(RequestKey("a"))) < num_tokens:
        bench.turn()
    bench.tell(MoveOut(key=RequestKey("a"), to=TO, num_output=num_tokens))
    assert bench.taken() == []
    return bench


def granted(num_output: int, cached: int = 0) -> Granted:
    """What a receiver asks for that knows so many output tokens: full blocks."""
    full = (len(PROMPT) + num_output - 1) // BLOCK
    return Granted(key=TO, num_cached_tokens=BLOCK * cached, num_tokens=BLOCK * full)


@pytest.mark.parametrize("depth", [1, 2])
def test_full_blocks_go_while_it_decodes_and_the_commit_brings_the_rest(depth: int) -> None:
    bench = started(depth)
    bench.turn()
    bench.tell(granted(5, cached=1))
    (push,) = bench.taken()
    ids = bench.scheduler._entries[RequestKey("a")].sequence.tables.ids[0]
    assert push == Push(key=TO, group=0, block_ids=(ids[1],), first_block=1, after=0)
    for _ in range(6):
        bench.turn()
    bench.tell(Sent(key=TO))
    sent = len(bench.output(RequestKey("a")))
    commits = bench.taken()
    while not commits:
        bench.turn()
        commits = bench.taken()
    output = bench.output(RequestKey("a"))
    assert output == expected_output(PROMPT, 0, len(output))
    assert sent <= len(output) <= sent + depth
    assert commits == [CommitHandoff(key=TO, tokens=tuple(output[5:]))]
    assert not bench.turn()  # it runs no further step
    bench.tell(Delivered(key=TO, report=REPORT))
    assert bench.idle()
    assert bench.scheduler.counters()[MOVED] == 1
    (event,) = bench.spans
    assert event.key == RequestKey("a")
    assert {Phase.TRANSFER, Phase.DECODE} <= {span.phase for span in event.spans}


def test_a_receiver_that_lacks_nothing_gets_the_commit_at_once() -> None:
    bench = started()
    bench.tell(granted(5, cached=2))
    assert [type(each) for each in bench.taken()] == [CommitHandoff]


@pytest.mark.parametrize("when", ["granted", "sent"])
def test_after_a_failure_it_goes_on_where_it_is(when: str) -> None:
    bench = started(2)
    bench.tell(granted(5))
    if when == "sent":
        bench.tell(Sent(key=TO))
        for _ in range(3):
            bench.turn()
    bench.tell(HandoffEnded(key=TO, error=HandoffFailed("refused").info()))
    bench.finish()
    assert bench.output(RequestKey("a")) == expected_output(PROMPT, 0, 40)
    assert bench.failures == []
    assert bench.idle()


def test_without_a_known_owner_its_attempt_fails_and_may_be_tried_again() -> None:
    bench = started()
    bench.tell(granted(5))
    bench.tell(Sent(key=TO))
    bench.tell(HandoffEnded(key=TO, error=None, uncertain=True))
    (failure,) = bench.failures
    assert (failure.key, failure.retriable) == (RequestKey("a"), True)
    assert failure.error.code is ErrorCode.HANDOFF_FAILED
    assert bench.scheduler.counters()[FAILED] == 1
    assert bench.idle()


@pytest.mark.parametrize("ends", ["cancelled", "finished"])
@pytest.mark.parametrize("how", ["ended", "delivered"])
def test_blocks_of_one_that_ends_on_its_way_stay_until_no_read_is_in_flight(
    ends: str, how: str
) -> None:
    bench = started(num_tokens=37)
    bench.tell(granted(37))
    bench.taken()
    if ends == "cancelled":
        bench.tell(RequestCancelled(keys=(RequestKey("a"),)))
    else:
        bench.finish()
        assert len(bench.output(RequestKey("a"))) == 40
    assert bench.taken() == [EndHandoff(key=TO, released=True, error=None)]
    assert bench.scheduler.load().held_blocks > 0
    bench.finish()
    count = len(bench.output(RequestKey("a")))
    if how == "ended":
        bench.tell(HandoffEnded(key=TO, error=None))
    else:
        bench.tell(Delivered(key=TO, report=REPORT))
    assert bench.idle()
    assert len(bench.output(RequestKey("a"))) == count
    assert bench.failures == []


def test_only_a_sequence_that_decodes_here_leaves_and_once() -> None:
    bench = Leaving()
    bench.submit(make_submit("a", list(range(30)), max_tokens=4))
    bench.turn()  # a part of its prompt
    for key in (RequestKey("a"), RequestKey("unknown")):
        bench.tell(MoveOut(key=key, to=TO, num_output=0))
        (refused,) = bench.taken()
        assert (refused.key, refused.released) == (TO, False)
        assert refused.error.code is ErrorCode.HANDOFF_FAILED
        bench.tell(HandoffEnded(key=TO, error=refused.error))
    bench.finish()
    bench = started()
    again = RequestKey("a", 2)
    bench.tell(MoveOut(key=RequestKey("a"), to=again, num_output=5))
    assert [each.key for each in bench.taken()] == [again]


@pytest.mark.parametrize("groups", [ONE_GROUP, (KVGroup(), KVGroup(window=2))])
def test_a_departing_sequence_keeps_its_blocks_when_they_run_out(
    groups: tuple[KVGroup, ...],
) -> None:
    """Its blocks are read, also those behind a window: an older one gives way."""
    bench = Leaving(num_blocks=14 if groups == ONE_GROUP else 21, groups=groups)
    old = bench.submit(make_submit("old", [8] * 7, max_tokens=30))
    bench.turn()
    young = bench.submit(make_submit("a", PROMPT, max_tokens=40))
    while len(bench.output(young)) < 10:
        bench.turn()
    bench.tell(MoveOut(key=young, to=TO, num_output=10))
    bench.tell(granted(10))
    read = [block for push in bench.taken() for block in push.block_ids]
    while not bench.scheduler.num_preemptions:
        bench.turn()
        assert all(map(bench.blocks.num_references, read))
    assert bench.scheduler._entries[young].sequence.stats.num_preemptions == 0
    bench.tell(HandoffEnded(key=TO, error=HandoffFailed("late").info()))
    bench.finish()
    assert bench.output(young) == expected_output(PROMPT, 0, 40)
    assert bench.output(old) == expected_output([8] * 7, 0, 30)
    assert bench.idle()


def test_one_with_a_window_leaves_at_a_later_try() -> None:
    """What its receiver needs lies before its window, and is kept from the first try on."""
    bench = started(groups=(KVGroup(), KVGroup(window=2)), num_tokens=11)
    tried, to = 0, TO
    while True:
        tried += 1
        known = len(bench.output(RequestKey("a")))
        bench.turn()
        full = (len(PROMPT) + known - 1) // BLOCK * BLOCK
        bench.tell(Granted(key=to, num_cached_tokens=0, num_tokens=full))
        sends = bench.taken()
        if not isinstance(sends[0], EndHandoff):
            break
        bench.tell(HandoffEnded(key=to, error=sends[0].error))
        bench.turn()
        to = RequestKey("a", tried + 1)
        bench.tell(
            MoveOut(key=RequestKey("a"), to=to, num_output=len(bench.output(RequestKey("a"))))
        )
    assert 1 < tried < 6
    assert [push.group for push in sends] == [0, 1]
    assert sends[1].first_block == KVGroup(window=2).first_token(full) // BLOCK
    bench.tell(RequestCancelled(keys=(RequestKey("a"),)))
    bench.tell(HandoffEnded(key=to, error=None))
    assert bench.idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_what_is_kept_for_a_move_that_failed_is_given_up_when_blocks_run_out(
    cached: bool, depth: int
) -> None:
    """The pool has room for the sequence with its windows, not for all of its KV."""
    config = WorkerConfig(
        max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0, enable_prefix_caching=cached
    )
    groups = (KVGroup(), KVGroup(window=2), KVGroup(window=2))
    bench = started(depth, groups=groups, num_blocks=24, config=config)
    bench.tell(HandoffEnded(key=TO, error=HandoffFailed("refused").info()))
    bench.finish()
    assert bench.output(RequestKey("a")) == expected_output(PROMPT, 0, 40)
    assert bench.scheduler.num_preemptions == 0
    assert bench.idle()
