"""The decode scheduler: right tokens under any mix of arrivals, preemption, cancel and hand-off."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.errors import ErrorCode, HandoffFailed
from protocol.ids import RequestKey, Role
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.states import FinishReason
from protocol.timeline import Phase
from tests.support.decode_bench import Bench, make_submit
from tests.support.paged import expected_output
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.messages import (
    BlocksSafe,
    Committed,
    HandoffEnded,
    MoveOut,
    RequestCancelled,
    RouterGone,
)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 31])
def test_local_prefill_in_chunks_gives_the_right_tokens(length: int) -> None:
    bench = Bench()
    prompt = list(range(10, 10 + length))
    key = bench.submit(make_submit("a", prompt, max_tokens=6))
    bench.finish()
    assert bench.output(key) == expected_output(prompt, 0, 6)
    assert [e.index for e in bench.tokens[key]] == list(range(6))
    assert [e.finish for e in bench.tokens[key]] == [None] * 5 + [FinishReason.LENGTH]
    assert bench.idle()


def test_nothing_is_sampled_before_the_last_chunk() -> None:
    bench = Bench()
    bench.submit(make_submit("a", list(range(20)), max_tokens=1))
    bench.finish()
    wanted = [step.sampling is not None for b in bench.engine.steps for step in b.sequences]
    assert wanted == [False, False, True]


def test_remote_sequence_starts_at_token_two_and_never_runs_its_prompt() -> None:
    bench = Bench()
    prompt = list(range(9))
    key = bench.submit(make_submit("a", prompt, max_tokens=4, remote=True))
    bench.finish()
    assert bench.output(key) == expected_output(prompt, 0, 4)[1:]
    assert [e.index for e in bench.tokens[key]] == [1, 2, 3]
    assert all(len(s.tokens) == 1 for b in bench.engine.steps for s in b.sequences)
    assert bench.idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_held_first_token_comes_with_the_plan_of_the_step_for_the_second(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.submit(make_submit("running", [1] * 5, max_tokens=40))
    bench.turn()
    prompt = list(range(9))
    key = bench.submit(make_submit("a", prompt, max_tokens=4, remote=True))
    bench.turn()
    bench.serve_reserves(held=3)
    assert bench.output(key) == []
    assert bench.prompts[key] == 3
    bench.scheduler.plan(bench.now)  # while the step in flight runs, or none
    bench.collect()
    assert bench.output(key) == expected_output(prompt, 0, 1)
    assert key in {row.entry.sequence.key for row in bench.scheduler._inflight.newest}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_held_first_token_is_sent_once(depth: int) -> None:
    bench = Bench(depth=depth)
    key = bench.submit(make_submit("a", list(range(9)), max_tokens=6, remote=True))
    bench.turn()
    bench.serve_reserves(held=3)
    bench.finish()
    assert [event.index for event in bench.tokens[key]] == list(range(6))
    assert bench.output(key) == expected_output(list(range(9)), 0, 6)
    assert bench.scheduler._untold == []


@pytest.mark.parametrize("how", ["cancel", "router", "broken", "move"])
def test_a_held_first_token_of_one_that_ends_before_is_not_sent_or_at_once(how: str) -> None:
    bench = Bench()
    prompt = list(range(9))
    key = bench.submit(make_submit("a", prompt, max_tokens=4, remote=True))
    bench.turn()
    bench.serve_reserves(held=0)
    match how:
        case "cancel":
            bench.tell(RequestCancelled(keys=(key,)))
        case "router":
            bench.tell(RouterGone(router_id="r"))
        case "broken":
            bench.scheduler.fail_all(HandoffFailed("engine").info())
        case "move":  # the receiver knows it from the commit alone, and does not send it
            bench.tell(MoveOut(key=key, to=RequestKey("a", 1), num_output=0))
            assert bench.output(key) == expected_output(prompt, 0, 1)
            return
    bench.finish()
    assert bench.output(key) == []
    assert bench.idle()


def test_grant_covers_the_prompt_and_one_more_token_is_reserved() -> None:
    bench = Bench()
    bench.submit(make_submit("a", list(range(8)), remote=True))
    bench.turn()
    assert len(bench.reserves[0].block_tables[0]) == 2
    assert bench.blocks.num_held == 3


def test_resumed_request_continues_at_its_index() -> None:
    bench = Bench()
    prompt = [5, 6, 7]
    whole = expected_output(prompt, 3, 8)
    key = bench.submit(
        make_submit("a", prompt, max_tokens=8, seed=3, output=tuple(whole[:5]), attempt=1)
    )
    bench.finish()
    assert bench.output(key) == whole[5:]
    assert [e.index for e in bench.tokens[key]] == [5, 6, 7]


def test_preempted_requests_end_with_the_same_tokens_and_repeat_none() -> None:
    bench = Bench(num_blocks=8)
    prompts = [[i, i + 1, i + 2] for i in range(0, 60, 10)]
    keys = [
        bench.submit(make_submit(f"q{i}", p, max_tokens=20, seed=i)) for i, p in enumerate(prompts)
    ]
    bench.finish()
    for i, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        assert bench.output(key) == expected_output(prompt, i, 20)
        assert [e.index for e in bench.tokens[key]] == list(range(20))
    assert bench.scheduler.num_preemptions > 0
    assert bench.idle()


def test_preempted_remote_sequence_is_recomputed_here_not_granted_again() -> None:
    bench = Bench(num_blocks=6)
    keys = [
        bench.submit(make_submit(f"q{i}", [i] * 7, max_tokens=12, seed=i, remote=True))
        for i in range(3)
    ]
    granted: list[RequestKey] = []
    for _ in range(400):
        bench.turn()
        granted += [r.key for r in bench.reserves]
        bench.serve_reserves()
    for i, key in enumerate(keys):
        assert bench.output(key) == expected_output([i] * 7, i, 12)[1:]
    assert bench.scheduler.num_preemptions > 0
    assert sorted(granted, key=str) == sorted(keys, key=str)
    assert bench.idle()


def test_one_that_does_not_fit_does_not_block_those_that_do() -> None:
    bench = Bench(num_blocks=10)
    bench.submit(make_submit("running", [1] * 20, max_tokens=15))
    bench.turn()
    big = bench.submit(make_submit("big", [2] * 30, max_tokens=2))
    small = bench.submit(make_submit("small", [3, 3], max_tokens=2))
    for _ in range(4):
        bench.turn()
    assert bench.output(small)
    assert not bench.output(big)
    bench.finish()
    assert bench.output(big) == expected_output([2] * 30, 0, 2)


def test_chunks_of_an_older_prompt_leave_a_decoding_sequence_its_place() -> None:
    bench = Bench()
    bench.submit(make_submit("old", [1] * 30))
    young = bench.submit(make_submit("young", [2] * 5, remote=True))
    bench.turn()
    bench.serve_reserves()
    bench.turn()
    sizes = [[len(step.tokens) for step in batch.sequences] for batch in bench.planned]
    assert sizes == [[8], [1, 7]]
    assert bench.output(young) == expected_output([2] * 5, 0, 2)[1:]


def test_request_that_comes_twice_runs_once() -> None:
    bench = Bench()
    submit = make_submit("a", list(range(9)))
    key = bench.submit(submit)
    bench.turn()
    bench.submit(submit)
    bench.finish()
    assert bench.output(key) == expected_output(list(range(9)), 0, 5)
    assert bench.idle()


@pytest.mark.parametrize("how", ["cancel", "router", "deadline", "broken"])
def test_request_that_waits_for_its_blocks_only_is_ended_once(how: str) -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(9)), remote=True, time_left_s=5.0))
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
    assert bench.blocks.num_quarantined == 3
    bench.tell(BlocksSafe(key=key))
    assert bench.blocks.num_quarantined == 0
    assert bench.idle()
    ended = {messages.CANCELLED: 1, messages.FAILED: 0}
    assert ended.items() <= bench.scheduler.counters().items()


def test_watermark_leaves_blocks_for_the_growth_of_those_that_run() -> None:
    config = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=8, watermark=0.25)
    bench = Bench(num_blocks=8, config=config)
    bench.submit(make_submit("whole", [1] * 27, max_tokens=3))  # alone it may have all
    bench.turn()
    assert bench.blocks.num_available == 1
    bench.finish()
    first = bench.submit(make_submit("first", [2] * 11, max_tokens=20))
    bench.submit(make_submit("second", [3] * 15, max_tokens=2))
    bench.submit(make_submit("third", [4] * 11, max_tokens=2))
    bench.turn()
    assert bench.blocks.num_available == 2
    assert bench.scheduler.load().waiting == 1
    bench.finish()
    assert bench.output(first) == expected_output([2] * 11, 0, 20)


def test_starving_request_gets_its_turn_before_younger_ones() -> None:
    config = WorkerConfig(
        max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0, starvation_s=10.0
    )
    bench = Bench(num_blocks=10, config=config)
    bench.submit(make_submit("running", [1] * 16, max_tokens=8))
    bench.turn()
    big = bench.submit(make_submit("big", [2] * 32, max_tokens=1))
    done_before_big = 0
    for i in range(200):
        bench.submit(make_submit(f"s{i}", [i], max_tokens=3))
        bench.turn()
        if bench.output(big):
            done_before_big = sum(len(v) == 3 for v in bench.tokens.values())
            break
    assert bench.output(big) == expected_output([2] * 32, 0, 1)
    assert done_before_big < 40


def test_a_sequence_that_fits_only_by_sharing_starts_once_there_is_something_to_share() -> None:
    """Six blocks: each of the two needs four, of which two can hold the same tokens."""
    bench = Bench(num_blocks=6)
    prompt = list(range(12))
    first = bench.submit(make_submit("first", prompt, max_tokens=4))
    second = bench.submit(make_submit("second", prompt, max_tokens=4, seed=1))
    for _ in range(4):  # the prompt takes two steps
        bench.turn()
    assert len(bench.output(first)) == 3
    assert bench.output(second)
    bench.finish()
    assert bench.output(second) == expected_output(prompt, 1, 4)


def test_long_local_prompt_never_stops_running_streams() -> None:
    bench = Bench(num_blocks=128)
    stream = bench.submit(make_submit("stream", [1, 2], max_tokens=30))
    bench.turn()
    bench.submit(make_submit("long", [7] * 150, max_tokens=1))
    for _ in range(20):
        had = len(bench.output(stream))
        bench.turn()
        assert len(bench.output(stream)) == had + 1


@pytest.mark.parametrize("phase", ["waiting", "arriving", "running"])
def test_cancel_frees_everything_in_every_phase(phase: str) -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(6)), remote=phase != "running"))
    if phase != "waiting":
        bench.turn()
    bench.tell(RequestCancelled(keys=(key, RequestKey("unknown"))))
    if phase == "arriving":
        assert bench.blocks.num_quarantined == 2
        bench.tell(HandoffEnded(key=key, error=None))
        assert bench.blocks.num_available == 62
        bench.tell(BlocksSafe(key=key))
    assert bench.idle()
    assert [e.key for e in bench.ends] == ([] if phase == "running" else [key])
    assert bench.scheduler.counters()[messages.CANCELLED] == 1
    assert not bench.turn()


@pytest.mark.parametrize("case", ["queued", "admitted", "begun", "remote", "decodes", "resumed"])
def test_a_prompt_is_given_back_until_it_has_begun(case: str) -> None:
    bench = Bench(depth=2)
    output = (7,) if case == "resumed" else ()
    submit = make_submit("a", list(range(20)), remote=case == "remote", output=output)
    key = bench.submit(submit)
    for _ in range({"begun": 1, "decodes": 4, "remote": 1}.get(case, 0)):
        bench.turn()
    if case == "admitted":
        bench.scheduler.admit(bench.now)
        assert bench.blocks.num_held
    bench.tell(RequestCancelled(keys=(key,), unless_begun=True))
    given = case in ("queued", "admitted")
    assert [(f.key, f.given_back, f.retriable) for f in bench.failures] == [
        (key, True, True)
    ] * given
    assert bench.scheduler.counters()[messages.GIVEN_BACK] == given
    assert bench.idle() == given
    bench.finish()
    assert bench.idle()
    assert bool(bench.output(key)) != given


def test_blocks_without_a_request_count_as_leaked() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(6))))
    bench.turn()
    worker = BothRoles({Role.DECODE: bench.scheduler}, bench.blocks, Role.DECODE)
    taken = bench.blocks.allocate(3)
    assert taken is not None
    assert worker.num_leaked_blocks() == 0  # unknown while a request runs
    bench.tell(RequestCancelled(keys=(key,)))
    assert worker.num_leaked_blocks() == 3
    bench.blocks.quarantine(taken[:1])
    assert worker.num_leaked_blocks() == 3
    bench.blocks.free(taken[1:])
    bench.blocks.unquarantine(taken[:1])
    assert worker.num_leaked_blocks() == 0


def test_commit_that_crosses_a_cancel_does_not_bring_the_sequence_back() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(6)), remote=True))
    bench.turn()
    bench.tell(RequestCancelled(keys=(key,)))
    bench.tell(Committed(key=key, tokens=(1,)))
    assert not bench.turn()
    bench.tell(BlocksSafe(key=key))
    assert bench.idle()


def test_failed_handoff_is_reported_as_retriable_and_quarantined() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(6)), remote=True))
    bench.turn()
    bench.tell(HandoffEnded(key=key, error=HandoffFailed("link lost").info()))
    assert bench.failures[0].key == key
    assert bench.failures[0].retriable
    assert bench.failures[0].error.code is ErrorCode.HANDOFF_FAILED
    assert bench.blocks.num_quarantined == 2
    bench.tell(BlocksSafe(key=key))
    assert bench.idle()


def test_handoff_released_by_prefill_ends_silently() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(6)), remote=True))
    bench.turn()
    bench.tell(HandoffEnded(key=key, error=None))
    bench.tell(BlocksSafe(key=key))
    assert bench.failures == []
    assert bench.tokens == {}
    assert bench.idle()


def test_router_that_leaves_takes_its_requests_with_it_and_no_others() -> None:
    bench = Bench()
    bench.submit(make_submit("a", [1, 2, 3], router="gone"))
    kept = bench.submit(make_submit("b", [1, 2, 3], router="here"))
    bench.turn()
    bench.tell(RouterGone(router_id="gone"))
    bench.finish()
    assert bench.output(kept) == expected_output([1, 2, 3], 0, 5)
    assert bench.idle()


@pytest.mark.parametrize("remote", [False, True])
def test_deadline_ends_a_request_with_a_typed_error(remote: bool) -> None:
    bench = Bench()
    key = bench.submit(
        make_submit("a", list(range(6)), max_tokens=50, remote=remote, time_left_s=5.0)
    )
    assert bench.scheduler.next_deadline() == 105
    for _ in range(8):
        bench.turn()
    assert bench.failures[-1].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert not bench.failures[-1].retriable
    bench.tell(BlocksSafe(key=key))
    assert bench.idle()


def test_repeated_submit_is_one_request() -> None:
    bench = Bench()
    submit = make_submit("a", [1, 2], max_tokens=3)
    bench.submit(submit)
    bench.submit(submit)
    bench.finish()
    assert bench.output(submit.key) == expected_output([1, 2], 0, 3)


def test_stop_tokens_end_the_sequence_and_min_tokens_bans_them() -> None:
    prompt = [4, 5]
    whole = expected_output(prompt, 0, 6)
    submit = make_submit("a", prompt, max_tokens=6)
    stop = whole[2]
    assert stop not in whole[:2]
    params = SamplingParams(max_tokens=6, stop_token_ids=(stop,), ignore_eos=True)
    bench = Bench()
    key = bench.submit(replace(submit, sampling=params))
    bench.finish()
    assert bench.output(key) == whole[:3]
    assert bench.tokens[key][-1].finish is FinishReason.STOP
    bench = Bench()
    params = SamplingParams(
        max_tokens=6, min_tokens=4, stop_token_ids=(stop,), eos_token_ids=(999,)
    )
    bench.submit(replace(submit, sampling=params))
    bench.finish()
    bans = [step.banned for b in bench.engine.steps for step in b.sequences]
    assert bans == [(stop, 999)] * 4 + [()] * 2


def test_fail_all_ends_every_request_as_retriable() -> None:
    bench = Bench()
    bench.submit(make_submit("a", [1, 2]))
    bench.turn()
    bench.submit(make_submit("b", [1, 2], remote=True))
    bench.scheduler.fail_all(HandoffFailed("broken").info())
    bench.collect()
    assert {f.key.request_id for f in bench.failures} == {"a", "b"}
    assert all(f.retriable for f in bench.failures)
    assert bench.idle()


def test_credits_leave_out_what_waiting_requests_will_take() -> None:
    config = WorkerConfig(max_num_seqs=1, max_num_batched_tokens=8, watermark=0.1)
    bench = Bench(num_blocks=20, config=config)
    bench.submit(make_submit("a", [1, 2], max_tokens=9))
    bench.turn()
    bench.submit(make_submit("b", [1] * 11))
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 11)
    assert load.free_blocks == 20 - 1 - 2 - 3


def test_load_tells_of_prompts_that_are_computed_here_and_only_of_them() -> None:
    bench = Bench(config=WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8))
    bench.submit(make_submit("a", list(range(9)), remote=True))
    bench.turn()
    assert bench.scheduler.load().waiting_tokens == 0
    bench.submit(make_submit("b", list(range(20)), max_tokens=9))
    seen = [20]
    while seen[-1]:
        bench.turn()
        seen.append(bench.scheduler.load().waiting_tokens)
    assert seen == [20, 12, 4, 0]


def test_timeline_names_the_phases_of_a_remote_request() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", list(range(9)), max_tokens=4, remote=True))
    bench.finish()
    spans = {span.phase: span for span in bench.tokens[key][-1].spans}
    assert set(spans) == {Phase.CREDIT_WAIT, Phase.DECODE_QUEUE, Phase.DECODE}
    assert spans[Phase.DECODE].counts["steps"] == 3
    assert all(span.start <= span.end and span.place == "here" for span in spans.values())


def scoring(name: str, prompt: list[int], *, max_tokens: int, remote: bool = False) -> Submit:
    submit = make_submit(name, prompt, max_tokens=max_tokens, remote=remote)
    return replace(submit, sampling=replace(submit.sampling, prompt_logprobs=0))


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("length", [1, 8, 27])
def test_a_prompt_that_is_prefilled_here_is_scored(length: int, max_tokens: int) -> None:
    bench = Bench(depth=2)
    prompt = list(range(50, 50 + length))
    key = bench.submit(scoring("a", prompt, max_tokens=max_tokens))
    bench.finish()
    found = [(e.start + i, -s.logprob) for e in bench.scores for i, s in enumerate(e.logprobs)]
    assert found == list(enumerate(prompt))[1:]
    assert bench.scores[-1].finish is (None if max_tokens else FinishReason.LENGTH)
    assert len(bench.tokens.get(key, ())) == max_tokens
    assert bench.idle()


def test_a_prompt_that_fills_the_pool_is_scored() -> None:
    bench = Bench(num_blocks=3)
    bench.submit(scoring("a", [1] * 12, max_tokens=0))
    bench.finish()
    assert bench.scores[-1].finish is FinishReason.LENGTH
    assert bench.idle()


def test_prompts_scored_elsewhere_or_before_a_preemption_are_not_scored_again() -> None:
    bench = Bench(num_blocks=8)
    keys = [bench.submit(scoring(f"q{i}", [i] * 5, max_tokens=20, remote=i < 2)) for i in range(5)]
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert all(event.logprobs for event in bench.scores)
    for i, key in enumerate(keys):
        starts = [e.start + n for e in bench.scores if e.key == key for n in range(len(e.logprobs))]
        assert starts == ([] if i < 2 else [1, 2, 3, 4])
        assert bench.output(key) == expected_output([i] * 5, 0, 20)[i < 2 :]
    assert bench.idle()
