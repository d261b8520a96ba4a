"""The prefill scheduler: chunks, pushes in order, token 1, and nothing held that need not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from protocol.errors import ErrorCode, HandoffFailed
from protocol.states import FinishReason
from protocol.timeline import Phase
from tests.support.paged import next_token, prompts
from tests.support.prefill_bench import Bench, make_submit
from tests.support.scheduler_bench import BLOCK
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.messages import (
    HELD,
    CommitHandoff,
    EndHandoff,
    Granted,
    HandoffEnded,
    RequestCancelled,
    RouterGone,
    Submitted,
)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 31])
def test_every_block_is_pushed_once_and_token_one_is_right(length: int) -> None:
    bench = Bench()
    prompt = list(range(50, 50 + length))
    key = bench.submit(make_submit("a", prompt))
    while bench.turn():
        pass
    assert bench.pushed_tokens(key, length) == prompt
    assert len(bench.arrived[key, 0]) == -(-length // BLOCK)
    first = next_token(prompt, 0)
    assert [(e.index, e.token, e.finish) for e in bench.tokens] == [(0, first, None)]
    assert bench.commits == [CommitHandoff(key=key, tokens=(first,))]
    assert bench.blocks.num_held == -(-length // BLOCK)
    bench.deliver(key)
    assert bench.blocks.num_available == 64
    assert bench.scheduler.num_unfinished == 0


@pytest.mark.parametrize(
    ("length", "promised_s", "scored", "output", "held"),
    [
        (3, None, {}, (), True),
        (20, None, {}, (), False),  # known after three steps of a second
        (3, 2.0, {}, (), True),
        (3, 1.1, {}, (), False),
        (3, None, {"logprobs": 0}, (), False),
        (3, None, {"prompt_logprobs": 0}, (), False),  # which have to come before it
        (3, None, {}, (7,), False),  # its client waits already
    ],
)
def test_a_first_token_that_can_wait_is_left_to_decode_to_send(
    length: int,
    promised_s: float | None,
    scored: dict[str, int],
    output: tuple[int, ...],
    held: bool,
) -> None:
    bench = Bench(config=WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8, hold_first_s=1.5))
    submit = make_submit("a", list(range(50, 50 + length)), output=output)
    sampling = structs.replace(submit.sampling, **scored)
    key = bench.submit(structs.replace(submit, first_s=promised_s, sampling=sampling))
    while bench.turn():
        pass
    first = next_token([*submit.prompt_ids, *output], 0)
    assert bench.commits == [CommitHandoff(key=key, tokens=(first,), held=0 if held else None)]
    assert [event.token for event in bench.tokens] == [first] * (not held)
    assert bench.prompts == {key: 0}
    assert bench.scheduler.counters()[HELD] == held
    bench.deliver(key)
    assert bench.blocks.num_available == 64


def test_a_request_is_as_old_as_the_worker_knows_it() -> None:
    bench = Bench(config=WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8, hold_first_s=1.5))
    submit = make_submit("a", [1, 2, 3])
    bench.tell(Submitted(submit=submit, at=bench.now - 0.75))
    bench.grant(submit)
    bench.turn()
    assert [commit.held for commit in bench.commits] == [None]  # after 1.75 s, not 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_first_token_that_is_the_last_is_sent_at_once(stops: bool) -> None:
    """Decode never runs such a request, so it would never send it."""
    bench = Bench(config=WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8, hold_first_s=1.5))
    submit, first = make_submit("a", [1, 2, 3]), next_token([1, 2, 3], 0)
    ends: dict[str, Any] = {"stop_token_ids": (first,)} if stops else {"max_tokens": 1}
    sampling = structs.replace(submit.sampling, **ends)
    key = bench.submit(structs.replace(submit, sampling=sampling))
    bench.turn()
    (event,) = bench.tokens
    assert (event.token, event.finish is not None) == (first, True)
    assert bench.commits == []
    bench.deliver(key)
    assert bench.blocks.num_available == 64


def test_blocks_move_while_the_rest_of_the_prompt_is_computed() -> None:
    bench = Bench()
    bench.submit(make_submit("a", list(range(20))))
    progress = []
    while bench.turn():
        progress.append(sum(len(p.block_ids) for p in bench.pushes))
    assert progress == [2, 4, 5]


def test_nothing_runs_and_nothing_is_held_before_the_grant() -> None:
    bench = Bench()
    submit = make_submit("a", list(range(20)))
    bench.submit(submit, grant=False)
    assert not bench.turn()
    assert bench.blocks.num_held == 0
    assert bench.scheduler.load().waiting_tokens == 20
    bench.grant(submit)
    assert bench.turn()


def test_a_few_tokens_alone_say_nothing_of_how_fast_work_gets_done() -> None:
    """By the rate of one short prompt, routers would refuse what can well be served in time."""
    bench = Bench(depth=2)  # a step lasts a second
    bench.submit(make_submit("short", list(range(3))))
    while bench.turn():
        pass
    assert bench.scheduler.load().tokens_per_second == 0.0
    bench.submit(make_submit("long", list(range(50, 50 + 25))))
    while bench.turn():
        pass
    assert bench.scheduler.load().tokens_per_second == pytest.approx(8.0)
    for name in "abcd":
        bench.submit(make_submit(name, [ord(name)] * 2))
    for name in "efgh":
        bench.submit(make_submit(name, [ord(name)]))
    while bench.turn():
        pass
    assert 4.0 < bench.scheduler.load().tokens_per_second < 8.0  # four sequences, four tokens


def test_blocks_that_decode_already_has_are_not_pushed() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(14))), cached=2)
    while bench.turn():
        pass
    assert sorted(bench.arrived[key, 0]) == [2, 3]


def test_fully_cached_prompt_pushes_nothing_and_still_commits() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(8))), cached=2)
    while bench.turn():
        pass
    assert bench.pushes == []
    assert [c.key for c in bench.commits] == [key]


@pytest.mark.parametrize("how", ["max_tokens", "stop"])
def test_request_that_ends_at_token_one_releases_decode(how: str) -> None:
    bench = Bench()
    prompt = [1, 2, 3]
    first = next_token(prompt, 0)
    stop = (first,) if how == "stop" else ()
    key = bench.submit(make_submit("a", prompt, max_tokens=1 if not stop else 5, stop=stop))
    bench.turn()
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    assert [(e.token, e.finish) for e in bench.tokens] == [(first, reason)]
    assert bench.commits == []
    assert bench.ends == [EndHandoff(key=key, released=True, error=None)]
    assert {span.phase for span in bench.tokens[0].spans} >= {Phase.PREFILL, Phase.CREDIT_WAIT}
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.blocks.num_available == 64
    assert bench.failures == []


def test_resumed_request_prefills_its_output_too() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", [1, 2, 3], output=(9, 8, 7)))
    bench.turn()
    assert bench.pushed_tokens(key, 6) == [1, 2, 3, 9, 8, 7]
    assert bench.tokens[0].index == 3
    assert bench.tokens[0].token == next_token([1, 2, 3, 9, 8, 7], 0)


def test_short_prompt_overtakes_a_long_one_between_its_chunks() -> None:
    bench = Bench(num_blocks=256)
    bench.submit(make_submit("long", [1] * 400))
    bench.turn()
    bench.turn()
    short = bench.submit(make_submit("short", [2, 3]))
    bench.turn()
    assert [e.key for e in bench.tokens] == [short]


def test_short_prompt_overtakes_a_long_one_that_has_run_for_long() -> None:
    """Time that a prompt has been running for is no time it has waited."""
    bench = Bench(num_blocks=256, config=replace(Bench().config, starvation_s=5.0))
    bench.submit(make_submit("long", [1] * 400))
    for _ in range(40):  # 40 s of its 50
        bench.turn()
    short = bench.submit(make_submit("short", [2, 3]))
    bench.turn()
    assert [e.key for e in bench.tokens] == [short]


def test_promised_first_tokens_decide_among_prompts_of_one_size() -> None:
    """Each is a second of work. One that is late already waits for one that is about to be, but not
    for those that have much time, or were promised nothing."""
    bench = Bench(num_blocks=256)
    promises = {"free": None, "loose": 60.0, "late": 1.5, "urgent": 2.2, "near": 4.0}
    for number, (name, first_s) in enumerate(promises.items()):
        bench.submit(structs.replace(make_submit(name, [number] * 8), first_s=first_s))
    while bench.turn():
        pass
    order = [event.key.request_id for event in bench.tokens]
    assert order[:2] == ["urgent", "late"]
    assert order[2:] == ["near", "free", "loose"]


def test_prompts_without_promises_keep_their_order() -> None:
    bench = Bench(num_blocks=256)
    for name, size in (("first", 8), ("second", 8), ("small", 7)):
        bench.submit(make_submit(name, [size] * size))
    while bench.turn():
        pass
    assert [event.key.request_id for event in bench.tokens] == ["small", "first", "second"]


def filled_steps(prompts: list[int], *, budget: int) -> list[list[int]]:
    """Prompt tokens of each step, filled to 8 of at most `budget`; prompts come in this order."""
    config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=budget, fill_tokens=8)
    bench = Bench(num_blocks=256, config=config)
    for number, size in enumerate(prompts):
        bench.submit(make_submit(f"p{number}", [number + 1] * size))
    while bench.turn():
        pass
    return [[len(step.tokens) for step in batch.sequences] for batch in bench.planned]


def test_prompts_are_not_cut_where_a_step_can_hold_them() -> None:
    assert filled_steps([3, 7, 9, 20], budget=20) == [[3, 7], [9], [20]]
    assert filled_steps([4, 5], budget=20) == [[4], [5]]  # half full: the next one waits
    assert filled_steps([21], budget=20) == [[8], [13]]  # no step holds it
    assert filled_steps([3, 7, 9], budget=8) == [[3, 5], [2, 6], [3]]
    assert filled_steps([3, 9], budget=10) == [[3], [9]]


def test_steps_beside_decode_are_cut_as_before_and_tell_the_rate() -> None:
    for fill, sizes in ((100, [100, 100, 100]), (800, [256, 256])):
        config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=900, fill_tokens=fill)
        bench = Bench(num_blocks=256, config=config, depth=2)
        bench.scheduler.shares_steps = True
        bench.submit(make_submit("a", [1] * sum(sizes)))
        while bench.turn():
            pass
        assert [batch.num_tokens for batch in bench.planned] == sizes
        assert bench.scheduler.load().tokens_per_second == pytest.approx(sizes[0])


def test_backlog_is_reported_by_the_size_of_what_is_left() -> None:
    bench = Bench(num_blocks=256)
    bench.submit(make_submit("long", [1] * 100))
    bench.submit(make_submit("waits", list(range(5))), grant=False)
    load = bench.scheduler.load()
    assert (load.backlog, load.waiting_tokens) == ((0, 0, 0, 5, 0, 0, 0, 100), 105)
    while bench.turn():
        pass
    load = bench.scheduler.load()
    assert (load.backlog, load.waiting_tokens) == ((0, 0, 0, 5), 5)


def test_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8, starvation_s=20.0)
    bench = Bench(num_blocks=256, config=config)
    long = bench.submit(make_submit("long", [1] * 64))
    for i in range(120):
        key = bench.submit(make_submit(f"s{i}", [2] * 8))
        bench.turn()
        for event in bench.tokens:
            if event.key == long:
                assert i < 100
                return
        if any(e.key == key for e in bench.tokens):
            bench.deliver(key)
    raise AssertionError("the long prompt never finished")


def test_prompt_that_has_waited_too_long_for_room_gets_what_becomes_free() -> None:
    config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=16, starvation_s=5.0)
    bench = Bench(num_blocks=8, config=config)
    long = make_submit("long", [1] * 28)
    shorts = [make_submit(f"s{i}", [2] * 7 + [i]) for i in range(30)]
    for i, short in enumerate(shorts):  # two of which hold half of the pool at any time
        bench.submit(short)
        if i == 2:
            bench.submit(long)
        bench.turn()
        for event in bench.tokens:
            if event.key in {each.key for each in shorts[: max(0, i - 1)]}:
                bench.deliver(event.key)
    began_before = [short.key for short in shorts[:7]]
    assert [event.key for event in bench.tokens] == [*began_before, long.key]


def test_prompt_without_room_waits_and_lets_others_pass() -> None:
    bench = Bench(num_blocks=6)
    first = bench.submit(make_submit("first", [1] * 16))
    bench.turn()
    bench.submit(make_submit("second", [2] * 16))
    small = bench.submit(make_submit("small", [3]))
    for _ in range(4):
        bench.turn()
    assert {e.key for e in bench.tokens} == {first, small}
    bench.deliver(first)
    for _ in range(4):
        bench.turn()
    assert len(bench.tokens) == 3


@pytest.mark.parametrize("phase", ["expecting", "granted", "running", "sending"])
def test_cancel_ends_the_handoff_and_frees_blocks_once_it_is_over(phase: str) -> None:
    bench = Bench()
    submit = make_submit("a", list(range(20)))
    key = bench.submit(submit, grant=phase != "expecting")
    turns = {"expecting": 0, "granted": 0, "running": 1, "sending": 3}[phase]
    for _ in range(turns):
        bench.turn()
    held = bench.blocks.num_held
    bench.tell(RequestCancelled(keys=(key,)))
    assert bench.ends == [EndHandoff(key=key, released=True, error=None)]
    assert bench.blocks.num_held == held
    assert not bench.turn()
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.blocks.num_available == 64
    assert bench.scheduler.num_unfinished == 0
    assert bench.failures == []


@pytest.mark.parametrize("how", ["cancel", "router", "deadline", "broken"])
def test_request_that_waits_for_its_blocks_only_is_ended_once(how: str) -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", [1, 2, 3], time_left_s=5.0))
    bench.turn()
    bench.tell(RequestCancelled(keys=(key,)))
    match how:
        case "cancel":
            bench.tell(RequestCancelled(keys=(key,)))
        case "router":
            bench.tell(RouterGone(router_id="r"))
        case "deadline":
            for _ in range(6):
                bench.turn()
        case "broken":
            bench.scheduler.fail_all(HandoffFailed("broken").info())
            bench.collect()
    assert (len(bench.ends), bench.failures) == (1, [])
    assert bench.blocks.num_held == 1
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.blocks.num_available == 64
    ended = {messages.CANCELLED: 1, messages.FAILED: 0, messages.RELEASED: 0}
    assert ended.items() <= bench.scheduler.counters().items()


def test_delivery_that_crosses_a_cancel_frees_the_blocks_once() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", [1, 2, 3]))
    bench.turn()
    bench.tell(RequestCancelled(keys=(key,)))
    bench.deliver(key)
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.blocks.num_available == 64
    ended = {messages.FINISHED: 0, messages.FAILED: 0, messages.CANCELLED: 1}
    assert ended.items() <= bench.scheduler.counters().items()


@pytest.mark.parametrize("depth", [1, 2])
def test_token_one_of_a_prompt_cancelled_in_flight_is_dropped(depth: int) -> None:
    bench = Bench(depth=depth)
    key = bench.submit(make_submit("a", [1, 2, 3]))
    batch = bench.scheduler.plan(bench.now)
    assert batch is not None
    bench.scheduler.launched(bench.executor.launch(batch).number)
    bench.tell(RequestCancelled(keys=(key,)))
    bench.scheduler.apply(bench.executor.wait(), bench.now)
    bench.collect()
    assert bench.tokens == bench.commits == []
    assert [(end.key, end.released) for end in bench.ends] == [(key, True)]
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.blocks.num_available == 64
    ended = {messages.CANCELLED: 1, messages.RELEASED: 0, messages.FAILED: 0}
    assert ended.items() <= bench.scheduler.counters().items()


def test_failed_handoff_is_retriable_and_frees_the_blocks() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", [1, 2, 3]))
    bench.turn()
    bench.tell(HandoffEnded(key=key, error=HandoffFailed("decode is gone").info()))
    assert [(f.error.code, f.retriable) for f in bench.failures] == [
        (ErrorCode.HANDOFF_FAILED, True)
    ]
    assert bench.blocks.num_available == 64


def test_deadline_ends_a_request_that_never_got_credits() -> None:
    bench = Bench()
    bench.submit(make_submit("a", [1], time_left_s=3.0), grant=False)
    for _ in range(4):
        bench.turn()
    assert bench.failures[0].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert not bench.ends[0].released


def test_timeline_has_transfer_with_bytes_after_delivery() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(20))))
    while bench.turn():
        pass
    bench.deliver(key)
    spans = {span.phase: span for span in bench.spans[0].spans}
    assert spans[Phase.TRANSFER].counts == {"bytes": 640, "pieces": 2}
    assert spans[Phase.PREFILL].counts == {"tokens": 20, "chunks": 3, "cached_tokens": 0}
    assert set(spans) == {
        Phase.CREDIT_WAIT,
        Phase.PREFILL_QUEUE,
        Phase.PREFILL,
        Phase.TRANSFER,
    }


def test_router_gone_cancels_its_requests_only() -> None:
    bench = Bench()
    bench.submit(make_submit("a", [1, 2], router="gone"))
    kept = bench.submit(make_submit("b", [1, 2], router="here"))
    bench.tell(RouterGone(router_id="gone"))
    bench.turn()
    assert [e.key for e in bench.tokens] == [kept]


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            prompts(),
            st.integers(0, 10),  # arrives
            st.integers(0, 6),  # granted so many turns later
            st.one_of(st.none(), st.integers(0, 30)),  # cancelled at turn
        ),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(8, 20),
    depth=st.sampled_from([1, 2]),
)
def test_any_mix_pushes_every_prompt_exactly(
    requests: list[tuple[list[int], int, int, int | None]], num_blocks: int, depth: int
) -> None:
    bench = Bench(num_blocks=num_blocks, depth=depth)
    submits = [make_submit(f"q{i}", prompt, seed=i) for i, (prompt, *_) in enumerate(requests)]
    cancelled: set[int] = set()
    for turn in range(200):
        for i, (_, arrives, delay, cancel) in enumerate(requests):
            if turn == arrives:
                bench.submit(submits[i], grant=False)
            if turn == arrives + delay:
                bench.grant(submits[i])
            if cancel is not None and turn == cancel and turn >= arrives:
                cancelled.add(i)
                bench.tell(RequestCancelled(keys=(submits[i].key,)))
                bench.tell(HandoffEnded(key=submits[i].key, error=None))
        bench.turn()
        if turn % 2:
            for commit in bench.commits:
                bench.deliver(commit.key)
    assert bench.blocks.num_available == num_blocks
    assert bench.scheduler.num_unfinished == 0
    first = {event.key: event.token for event in bench.tokens}
    for i, (prompt, *_) in enumerate(requests):
        if i not in cancelled:
            assert bench.pushed_tokens(submits[i].key, len(prompt)) == prompt
            assert first[submits[i].key] == next_token(prompt, i)


def test_next_chunk_follows_the_one_in_flight_and_blocks_leave_after_their_step() -> None:
    bench = Bench(depth=2)
    key = bench.submit(make_submit("a", list(range(20))))
    pushed, left = [], []
    while bench.turn():
        pushed.append(sum(len(p.block_ids) for p in bench.pushes))
        left.append(sum(map(len, bench.arrived.values())))
    assert pushed == [2, 4, 5, 5]
    assert left == [0, 2, 4, 5]
    assert bench.pushed_tokens(key, 20) == list(range(20))
    assert [s.start for b in bench.engine.steps for s in b.sequences] == [0, 8, 16]


def test_next_chunk_need_not_wait_for_the_block_that_the_one_in_flight_left_half_full() -> None:
    config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=6)
    bench = Bench(depth=2, config=config)
    bench.submit(make_submit("a", list(range(18))))
    bench.turn()
    bench.turn()
    assert bench.executor.number == 2


@pytest.mark.parametrize("output", [(), (5, 6)])
def test_request_that_is_known_to_end_at_token_one_moves_no_kv(output: tuple[int, ...]) -> None:
    bench = Bench()
    limit = len(output) + 1
    prompt = list(range(20))
    again = bench.submit(make_submit("a", prompt))  # leaves blocks in the cache
    while bench.turn():
        pass
    bench.deliver(again)
    bench.pushes.clear()
    key = bench.submit(make_submit("b", prompt, max_tokens=limit, output=output))
    while bench.turn():
        pass
    assert bench.tokens[-1].finish is FinishReason.LENGTH
    assert bench.pushes == []
    assert [(end.key, end.released) for end in bench.ends] == [(key, True)]


@pytest.mark.parametrize(("cached_tokens", "first"), [(0, 0), (3, 0), (4, 1), (10, 2), (16, 4)])
def test_what_decode_has_in_blocks_of_its_own_size_is_not_pushed(
    cached_tokens: int, first: int
) -> None:
    bench = Bench()
    submit = make_submit("a", list(range(19)))
    bench.submit(submit, grant=False)
    bench.tell(Granted(key=submit.key, num_cached_tokens=cached_tokens, num_tokens=0))
    while bench.turn():
        pass
    assert bench.pushes[0].first_block == first
    assert sum(len(push.block_ids) for push in bench.pushes) == 5 - first


def test_request_that_ends_at_token_one_is_not_decoded_ahead() -> None:
    bench = Bench(depth=2)
    bench.submit(make_submit("a", [1, 2, 3]))
    while bench.turn():
        pass
    assert len(bench.engine.steps) == 1


def test_blocks_of_a_handoff_that_ends_in_flight_outlive_the_step() -> None:
    bench = Bench(depth=2)
    key = bench.submit(make_submit("a", list(range(20))))
    bench.turn()
    bench.turn()
    bench.tell(RequestCancelled(keys=(key,)))
    bench.tell(HandoffEnded(key=key, error=None))
    assert bench.scheduler.num_unfinished == 0
    assert bench.blocks.num_held == 5
    assert bench.turn()
    assert bench.blocks.num_held == 0
    assert [p.first_block for p in bench.pushes] == [0, 2]
    assert not bench.turn()


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 4, 8, 9, 27])
def test_a_prompt_is_scored_once_and_before_token_one(
    length: int, depth: int, max_tokens: int
) -> None:
    bench = Bench(depth=depth)
    prompt = list(range(50, 50 + length))
    submit = make_submit("a", prompt, max_tokens=max_tokens)
    submit = structs.replace(submit, sampling=structs.replace(submit.sampling, prompt_logprobs=0))
    bench.tell(Submitted(submit=submit))
    bench.grant(submit)
    while bench.turn():
        assert not bench.tokens or len(prompt) == 1 + sum(len(e.logprobs) for e in bench.scores)
    found = [(e.start + i, entry) for e in bench.scores for i, entry in enumerate(e.logprobs)]
    assert [(at, -entry.logprob) for at, entry in found] == list(enumerate(prompt))[1:]
    assert [e.finish for e in bench.scores[:-1]] == [None] * (len(bench.scores) - 1)
    if max_tokens:
        assert bench.scores[-1].finish is None
        assert len(bench.tokens) == len(bench.commits) == 1
        return
    assert bench.scores[-1].finish is FinishReason.LENGTH
    assert bench.scores[-1].spans
    assert bench.tokens == bench.pushes == bench.commits == [], "decode has nothing to do"
    assert [end.released for end in bench.ends] == [True]
    bench.tell(HandoffEnded(key=submit.key, error=None))
    assert bench.scheduler.num_unfinished == 0
    assert bench.blocks.num_held == 0
