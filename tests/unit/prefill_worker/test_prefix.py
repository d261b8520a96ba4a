"""The prefix cache of a prefill worker: what is computed, and what is pushed when."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.errors import HandoffFailed
from protocol.ids import RequestKey
from protocol.sampling import SamplingParams
from tests.support.paged import next_token
from tests.support.prefill_bench import Bench, make_submit
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.messages import HandoffEnded

PROMPT = list(range(50, 64))  # three full blocks of 4 and a half


def run(bench: Bench, *keys: RequestKey) -> int:
    """Run and deliver what was submitted; the tokens that were computed for it."""
    before = len(bench.engine.steps)
    while bench.turn():
        pass
    for key in keys:
        bench.deliver(key)
    return sum(batch.num_tokens for batch in bench.engine.steps[before:])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_computed_once_and_pushed_each_time(depth: int) -> None:
    bench = Bench(depth=depth)
    key = bench.submit(make_submit("a", PROMPT))
    assert run(bench, key) == 14
    longer = [*PROMPT[:9], 1, 2, 3, 4]
    second = bench.submit(make_submit("b", longer))
    assert run(bench, second) == 13 - 8
    assert bench.pushed_tokens(second, 13) == longer
    assert [e.token for e in bench.tokens] == [next_token(PROMPT, 0), next_token(longer, 0)]
    assert bench.prompts == {key: 0, second: 8}
    assert (bench.blocks.num_held, bench.blocks.num_available) == (0, 64)
    hits = bench.scheduler.counters()
    assert hits[messages.PREFIX_CACHE_QUERIES] == 14 + 13
    assert hits[messages.PREFIX_CACHE_HITS] == 8


def test_what_is_there_is_pushed_before_the_rest_is_computed() -> None:
    bench = Bench()
    run(bench, bench.submit(make_submit("a", PROMPT)))
    bench.pushes.clear()
    bench.submit(make_submit("b", PROMPT), cached=1)
    bench.scheduler.plan(bench.now)
    bench.collect()
    (push,) = bench.pushes
    assert (push.first_block, len(push.block_ids)) == (1, 2)


def test_the_last_token_always_runs() -> None:
    bench = Bench()
    prompt = PROMPT[:12]
    run(bench, bench.submit(make_submit("a", prompt)))
    second = bench.submit(make_submit("b", prompt), cached=3)
    assert run(bench, second) == 4
    assert bench.tokens[-1].token == next_token(prompt, 0)
    assert bench.prompts[second] == 8
    assert second not in bench.arrived  # decode has it all: nothing is pushed
    assert [c.key for c in bench.commits][-1] == second


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_prompt_at_once_is_computed_once(depth: int) -> None:
    bench = Bench(depth=depth)
    keys = [bench.submit(make_submit(f"q{i}", PROMPT, seed=i)) for i in range(4)]
    assert run(bench, *keys) == 14 + 3 * 2
    assert [bench.prompts[key] for key in keys] == [0, 12, 12, 12]
    assert {e.key: e.token for e in bench.tokens} == {
        key: next_token(PROMPT, i) for i, key in enumerate(keys)
    }
    assert all(bench.pushed_tokens(key, 14) == PROMPT for key in keys)
    assert bench.blocks.num_held == 0


def test_a_follower_goes_on_when_its_leader_is_gone() -> None:
    bench = Bench()
    leader = bench.submit(make_submit("a", PROMPT))
    follower = bench.submit(make_submit("b", [*PROMPT, 1, 2]))
    bench.turn()  # eight tokens of the leader
    bench.tell(HandoffEnded(key=leader, error=HandoffFailed("lost").info()))
    assert run(bench, follower) == 16 - 8
    assert bench.prompts[follower] == 8
    assert bench.pushed_tokens(follower, 16) == [*PROMPT, 1, 2]
    assert bench.blocks.num_held == 0


def test_a_failed_handoff_leaves_what_was_computed_for_the_next_attempt() -> None:
    bench = Bench()
    key = bench.submit(make_submit("a", PROMPT))
    run(bench)
    bench.tell(HandoffEnded(key=key, error=HandoffFailed("lost").info()))
    assert run(bench, bench.submit(make_submit("b", PROMPT))) == 2


def test_a_prompt_that_is_mostly_there_goes_before_a_shorter_one() -> None:
    bench = Bench()
    run(bench, bench.submit(make_submit("a", list(range(40)))))
    assert bench.scheduler.load().waiting_tokens == 0
    short = bench.submit(make_submit("short", [99] * 8))
    known = bench.submit(make_submit("known", [*range(40), 1]))
    assert bench.scheduler.load().waiting_tokens == 8 + 1
    bench.tokens.clear()
    run(bench, short, known)
    assert [e.key for e in bench.tokens] == [known, short]


@pytest.mark.parametrize("how", ["bypass", "prompt logprobs"])
def test_a_prompt_whose_logits_are_wanted_runs_whole(how: str) -> None:
    bench = Bench()
    run(bench, bench.submit(make_submit("a", PROMPT)))
    wanted = make_submit("b", PROMPT)
    if how == "bypass":
        wanted = replace(wanted, bypass_prefix_cache=True)
    else:
        wanted = replace(wanted, sampling=SamplingParams(max_tokens=3, prompt_logprobs=0))
    assert run(bench, bench.submit(wanted)) == 14
    assert bench.prompts[wanted.key] == 0
    assert bench.blocks.num_held == 0
