"""The decode scheduler with one and with two steps in flight: the same tokens, exact accounts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.errors import HandoffFailed
from protocol.ids import RequestKey
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.support.decode_bench import Bench, make_submit
from tests.support.paged import expected_output, prompts
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import RequestCancelled, RouterGone
from worker_runtime.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Script:
    """What happens to one request, and when (in turns)."""

    prompt: list[int]
    max_tokens: int
    stop_at: int | None  # the output index whose token is a stop token
    remote: bool
    arrives: int
    ends: str  # how it is ended from outside, if at all
    ends_at: int


scripts = st.lists(
    st.builds(
        Script,
        prompt=prompts(),
        max_tokens=st.integers(2, 14),
        stop_at=st.one_of(st.none(), st.integers(1, 9)),
        remote=st.booleans(),
        arrives=st.integers(0, 12),
        ends=st.sampled_from(["no", "no", "cancel", "deadline", "router"]),
        ends_at=st.integers(0, 25),
    ),
    min_size=1,
    max_size=10,
)


def scripted(i: int, script: Script) -> tuple[Submit, list[int]]:
    """The request, and its output if it is not cancelled."""
    whole = expected_output(script.prompt, i, script.max_tokens)
    stop = () if script.stop_at is None else tuple(whole[script.stop_at : script.stop_at + 1])
    sampling = SamplingParams(
        seed=i, max_tokens=script.max_tokens, ignore_eos=True, stop_token_ids=stop
    )
    submit = make_submit(
        f"q{i}",
        script.prompt,
        remote=script.remote,
        router=f"r{i}",
        time_left_s=1.5 + script.ends_at if script.ends == "deadline" else 1e9,
    )
    end = next((n + 1 for n, token in enumerate(whole) if token in stop), len(whole))
    return replace(submit, sampling=sampling), whole[:end]


@settings(max_examples=200, deadline=None)
@given(
    scripts=scripts,
    num_blocks=st.integers(11, 24),
    depth=st.sampled_from([1, 2]),
    prefill_pace=st.integers(1, 4),
)
def test_any_mix_gives_every_request_its_own_tokens(
    scripts: list[Script], num_blocks: int, depth: int, prefill_pace: int
) -> None:
    bench = Bench(num_blocks=num_blocks, depth=depth)
    requests = [scripted(i, script) for i, script in enumerate(scripts)]
    for turn in range(1500):
        for script, (submit, _) in zip(scripts, requests, strict=True):
            if script.arrives == turn:
                bench.submit(submit)
            if script.ends_at == turn >= script.arrives:
                if script.ends == "cancel":
                    bench.tell(RequestCancelled(keys=(submit.key,)))
                elif script.ends == "router":
                    bench.tell(RouterGone(router_id=submit.router_id))
        busy = bench.turn() or bench.ends or bench.reserves
        bench.end_handoffs()
        if turn % prefill_pace == 0:
            bench.serve_reserves()
        if turn > 40 and not busy:
            break
    assert bench.idle()
    for script, (submit, wanted) in zip(scripts, requests, strict=True):
        wanted = wanted[1 if script.remote else 0 :]
        # A remote request that ends at token 1 never gets here; without prefill, decode goes on.
        if script.remote and not wanted:
            continue
        got = bench.output(submit.key)
        assert got == (wanted if script.ends == "no" else wanted[: len(got)])
        assert [e.finish is not None for e in bench.tokens.get(submit.key, [])][:-1] == [
            False
        ] * max(0, len(got) - 1)


def test_next_step_is_planned_with_the_token_in_flight() -> None:
    bench = Bench(depth=2)
    bench.submit(make_submit("a", [1, 2, 3], max_tokens=4))
    bench.submit(make_submit("b", [4, 5, 6], max_tokens=4))
    while bench.turn():
        pass
    plans = [[(s.start, s.previous) for s in batch.sequences] for batch in bench.planned]
    chunk, decodes = [(0, None), (0, None)], [[(n, 0), (n, 1)] for n in (3, 4, 5)]
    assert plans == [chunk, *decodes]


def test_no_step_is_launched_for_what_max_tokens_rules_out() -> None:
    bench = Bench(depth=2)
    bench.submit(make_submit("a", [1, 2, 3], max_tokens=1))
    while bench.turn():
        pass
    assert len(bench.planned) == 1


def test_token_after_a_stop_token_is_dropped_and_its_blocks_outlive_its_step() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    stop = expected_output(prompt, 0, 2)[1]
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(stop,))
    bench = Bench(depth=2)
    key = bench.submit(replace(make_submit("a", prompt), sampling=sampling))
    bench.turn()  # launches the prompt
    bench.turn()  # launches token 1, lands the prompt
    bench.turn()  # launches token 2, lands token 1, which is the end
    assert bench.output(key) == expected_output(prompt, 0, 2)
    assert bench.scheduler.num_unfinished == 0
    assert bench.blocks.num_held == 2
    bench.turn()
    assert bench.output(key) == expected_output(prompt, 0, 2)
    assert bench.idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_older_sequence_gets_the_blocks_of_the_one_it_preempts(depth: int) -> None:
    bench = Bench(num_blocks=6, depth=depth)
    old = bench.submit(make_submit("old", [1, 2, 3], max_tokens=16))
    young = bench.submit(make_submit("young", [4, 5, 6], max_tokens=16, seed=1))
    late = bench.submit(make_submit("late", [7] * 7, max_tokens=3, seed=2, remote=True))
    bench.finish()
    assert bench.output(old) == expected_output([1, 2, 3], 0, 16)
    assert bench.output(young) == expected_output([4, 5, 6], 1, 16)
    assert bench.output(late) == expected_output([7] * 7, 2, 3)[1:]
    assert bench.scheduler.num_preemptions > 0
    assert len(bench.tokens[old]) == 16
    assert bench.idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_other_is_preempted_or_admitted_while_a_victim_gives_its_blocks(depth: int) -> None:
    """Two need a block in the same step; the blocks of the youngest serve both."""
    config = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0, starvation_s=1e6)
    bench = Bench(num_blocks=6, depth=depth, config=config)
    for i in range(3):
        bench.submit(make_submit(f"q{i}", [i] * 3, max_tokens=7, seed=i))
    while bench.blocks.num_available:
        bench.turn()
    late = bench.submit(make_submit("late", [9] * 6, max_tokens=2))
    bench.finish()
    assert bench.scheduler.num_preemptions == 1
    for i in range(3):
        assert bench.output(RequestKey(f"q{i}")) == expected_output([i] * 3, i, 7)
    assert bench.output(late) == expected_output([9] * 6, 0, 2)
    assert bench.idle()


def test_request_that_cannot_plan_ahead_waits_for_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sequence, "plans_ahead", property(lambda _: False))
    bench = Bench(depth=2)
    key = bench.submit(make_submit("a", [1, 2, 3], max_tokens=4))
    bench.finish()
    assert bench.output(key) == expected_output([1, 2, 3], 0, 4)
    assert all(s.previous is None for batch in bench.planned for s in batch.sequences)


def test_min_tokens_counts_the_token_in_flight() -> None:
    bench = Bench(depth=2)
    params = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(1001,), ignore_eos=True)
    bench.submit(replace(make_submit("a", [4, 5]), sampling=params))
    bench.finish()
    bans = [step.banned for b in bench.planned for step in b.sequences]
    assert bans == [(1001,)] * 4 + [()] * 2


def test_fail_all_with_steps_in_flight_ends_every_request_once() -> None:
    bench = Bench(depth=2)
    bench.submit(make_submit("a", [1, 2]))
    bench.turn()
    bench.scheduler.fail_all(HandoffFailed("broken").info())
    bench.collect()
    assert [f.key.request_id for f in bench.failures] == ["a"]
    assert bench.scheduler.num_unfinished == 0
    bench.turn()
    assert bench.tokens == {}
    assert bench.idle()
