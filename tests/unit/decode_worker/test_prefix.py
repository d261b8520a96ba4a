"""The prefix cache of a decode worker: what is reused, sent, kept and given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec import structs

from engine.batch import SequenceStep
from protocol.errors import HandoffFailed
from protocol.ids import RequestKey
from tests.support.decode_bench import Bench, make_submit
from tests.support.paged import expected_output
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages
from worker_runtime.scheduling.messages import BlocksSafe, Committed, HandoffEnded, RequestCancelled
from worker_runtime.scheduling.sequence import Sequence

PROMPT = list(range(10, 24))  # three full blocks of 4 and a half
CONFIG = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0)


def computed(bench: Bench) -> int:
    """Tokens that ran since the last call."""
    tokens = sum(batch.num_tokens for batch in bench.planned)
    bench.planned.clear()
    return tokens


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_second_turn_reuses_prompt_and_output(remote: bool, depth: int) -> None:
    bench = Bench(depth=depth)
    first = bench.submit(make_submit("a", PROMPT, max_tokens=8, remote=remote))
    bench.finish()
    output = expected_output(PROMPT, 0, 8)
    assert bench.output(first) == output[remote:]
    computed(bench)
    bench.num_sent = 0
    # 14 + 8 tokens, the last of which never ran: five full blocks are there
    turn = [*PROMPT, *output, 1, 2, 3]
    second = bench.submit(make_submit("b", turn, max_tokens=4, remote=remote))
    bench.finish()
    assert bench.output(second) == expected_output(turn, 0, 4)[remote:]
    if remote:
        assert (bench.num_sent, computed(bench)) == (5, 3)
        assert second not in bench.prompts  # prefill says how much it computed
    else:
        assert bench.prompts[second] == 20
        assert computed(bench) == 5 + 3
    assert bench.idle()
    hits = bench.scheduler.counters()
    assert hits[messages.PREFIX_CACHE_QUERIES] == 14 + 25
    assert hits[messages.PREFIX_CACHE_HITS] == 20


def test_of_a_prompt_that_is_all_there_the_last_block_runs_again_here() -> None:
    bench = Bench()
    prompt = PROMPT[:12]
    for name, cached in (("a", 0), ("b", 8)):
        key = bench.submit(make_submit(name, prompt, max_tokens=1))
        bench.finish()
        assert bench.prompts[key] == cached
        assert bench.output(key) == expected_output(prompt, 0, 1)
    assert bench.idle()


def test_of_a_prompt_that_is_all_there_nothing_is_sent() -> None:
    bench = Bench()
    prompt = PROMPT[:12]
    for name, sent in (("a", 12), ("b", 0)):
        bench.num_sent = 0
        key = bench.submit(make_submit(name, prompt, remote=True))
        bench.turn()
        (reserve,) = bench.reserves
        assert (len(reserve.block_tables[0]), 4 * reserve.num_cached_blocks) == (3, 12 - sent)
        bench.finish()
        assert bench.num_sent == sent
        assert bench.output(key) == expected_output(prompt, 0, 5)[1:]
    assert bench.idle()


def test_requests_at_once_share_what_one_of_them_computes() -> None:
    bench = Bench()
    keys = [bench.submit(make_submit(f"q{i}", PROMPT, seed=i, max_tokens=1)) for i in range(4)]
    bench.finish()
    assert [bench.output(key) for key in keys] == [expected_output(PROMPT, i, 1) for i in range(4)]
    assert [bench.prompts[key] for key in keys] == [0, 12, 12, 12]
    assert computed(bench) == 14 + 3 * 2
    assert bench.idle()


def test_handoffs_of_the_same_prompt_wait_for_the_first() -> None:
    bench = Bench()
    keys = [bench.submit(make_submit(f"q{i}", PROMPT, seed=i, remote=True)) for i in range(3)]
    other = bench.submit(make_submit("other", [*PROMPT[:8], 1, 2, 3, 4], remote=True))
    bench.turn()
    assert [r.key for r in bench.reserves] == [keys[0], other]
    bench.finish()
    for i, key in enumerate(keys):
        assert bench.output(key) == expected_output(PROMPT, i, 5)[1:]
    assert bench.num_sent == 14 + 12 + 2 * 2
    assert bench.idle()


def test_handoffs_from_different_workers_do_not_wait() -> None:
    bench = Bench()
    first = make_submit("a", PROMPT, remote=True)
    assert first.peer is not None
    elsewhere = structs.replace(first.peer, worker_id="p1", epoch=8)
    for submit in (first, structs.replace(make_submit("b", PROMPT, remote=True), peer=elsewhere)):
        bench.submit(submit)
    bench.turn()
    assert [reserve.num_cached_blocks for reserve in bench.reserves] == [0, 0]
    bench.finish()
    assert bench.idle()


@pytest.mark.parametrize("how", ["fails", "is cancelled", "takes long"])
def test_those_that_wait_for_a_handoff_do_not_share_its_fate(how: str) -> None:
    bench = Bench(config=replace(CONFIG, starvation_s=5.0))
    first = bench.submit(make_submit("a", PROMPT, remote=True))
    second = bench.submit(make_submit("b", PROMPT, remote=True))
    bench.turn()
    (reserve,) = bench.reserves
    bench.reserves.clear()
    if how == "fails":
        bench.tell(HandoffEnded(key=first, error=HandoffFailed("lost").info()))
    elif how == "is cancelled":
        bench.tell(RequestCancelled(keys=(first,)))
    for _ in range(6):
        bench.turn()
    assert [r.key for r in bench.reserves] == [second]
    assert bench.reserves[0].num_cached_blocks == 0
    assert not set(bench.reserves[0].block_tables[0]) & set(reserve.block_tables[0])
    if how == "takes long":
        bench.reserves.append(reserve)
    else:
        bench.tell(BlocksSafe(key=first))
    bench.finish()
    assert bench.output(second) == expected_output(PROMPT, 0, 5)[1:]
    assert bench.idle()


def test_waiting_for_a_silent_handoff_ends_in_time_though_nothing_else_happens() -> None:
    bench = Bench(config=replace(CONFIG, starvation_s=5.0))
    bench.submit(make_submit("a", PROMPT, remote=True))
    second = bench.submit(make_submit("b", PROMPT, remote=True))
    bench.turn()
    assert [r.key.request_id for r in bench.reserves] == ["a"]
    wake = bench.scheduler.next_deadline()
    assert wake == 105.0
    bench.now = wake - 1.0
    bench.turn()
    assert bench.reserves[-1].key == second
    assert bench.scheduler.next_deadline() == 1e9 + 100.0
    bench.finish()
    assert bench.idle()


@pytest.mark.parametrize("crossing", [False, True])
def test_nothing_of_a_handoff_that_failed_is_kept(crossing: bool) -> None:
    bench = Bench()
    bench.submit(make_submit("a", PROMPT[:8], remote=True))
    bench.finish()  # two blocks are cached, and the new request holds them
    key = bench.submit(make_submit("b", PROMPT, remote=True))
    bench.turn()
    assert bench.reserves[0].num_cached_blocks == 2
    held, quarantined = bench.blocks.num_held, bench.blocks.num_quarantined
    bench.tell(RequestCancelled(keys=(key,)))
    assert (held, quarantined, bench.blocks.num_held) == (4, 0, 0)
    assert bench.blocks.num_quarantined == 2  # those that decode had are not touched
    if crossing:
        bench.tell(Committed(key=key, tokens=(1,)))
    bench.tell(BlocksSafe(key=key))
    bench.reserves.clear()
    again = bench.submit(make_submit("c", PROMPT, remote=True))
    bench.turn()
    assert bench.reserves[0].num_cached_blocks == 2
    bench.finish()
    assert bench.output(again) == expected_output(PROMPT, 0, 5)[1:]
    assert bench.idle()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    bench = Bench(num_blocks=9)
    prompts = [[i] * 7 for i in range(1, 4)]
    keys = [
        bench.submit(make_submit(f"q{i}", p, max_tokens=12, seed=i)) for i, p in enumerate(prompts)
    ]
    bench.finish()
    for i, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        assert bench.output(key) == expected_output(prompt, i, 12)
    assert bench.scheduler.num_preemptions > 0
    assert computed(bench) < 3 * 18 + bench.scheduler.num_preemptions * 7
    assert {bench.prompts[key] for key in keys} == {0}
    assert bench.idle()


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(5, 40)), min_size=2, max_size=6),
    num_blocks=st.integers(12, 18),
    gaps=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    max_tokens=st.integers(5, 30),
)
def test_no_prompt_token_counts_as_cached_that_ran_for_its_request(
    prompts: list[tuple[int, int]], num_blocks: int, gaps: list[int], max_tokens: int
) -> None:
    """However often a prompt is preempted, evicted, and found again, by others or by itself."""
    bench = Bench(num_blocks=num_blocks)
    ran: dict[RequestKey, set[int]] = {}
    launch = Sequence.launch

    def noted(self: Sequence, num_tokens: int, **rest: Any) -> SequenceStep:
        told = self.num_output + self.num_pending > 0
        step = launch(self, num_tokens, **rest)
        if not told:
            ran.setdefault(self.key, set()).update(range(step.start, step.start + num_tokens))
        return step

    lengths = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "launch", noted)
        for number, ((kind, length), gap) in enumerate(zip(prompts, gaps, strict=False)):
            limit = min(max_tokens, 4 * num_blocks - length)
            prompt = [1000 * kind + i for i in range(length)]
            key = bench.submit(make_submit(f"q{number}", prompt, max_tokens=limit))
            lengths[key] = length
            for _ in range(gap):
                bench.turn()
        bench.finish()
    for key, length in lengths.items():
        assert bench.prompts[key] <= length - len(ran[key])


def test_under_pressure_the_least_recently_used_goes() -> None:
    bench = Bench(num_blocks=12)
    prompts = {name: [i * 10 + n for n in range(9)] for i, name in enumerate("abc")}
    for name in "abac":  # each takes three blocks of the 12, two of which are full
        bench.submit(make_submit(name * 2, prompts[name], max_tokens=1))
        bench.finish()
    big = bench.submit(make_submit("big", [99] * 30, max_tokens=1))  # eight blocks
    bench.finish()
    assert bench.output(big) == expected_output([99] * 30, 0, 1)
    cached = {}
    for name in "cab":
        key = bench.submit(make_submit(name * 3, prompts[name], max_tokens=1))
        bench.finish()
        cached[name] = bench.prompts[key]
    assert cached == {"c": 8, "a": 8, "b": 0}
    assert bench.idle()


def test_blocks_in_the_cache_are_credits() -> None:
    bench = Bench(num_blocks=16)
    bench.submit(make_submit("a", PROMPT, max_tokens=1))
    bench.finish()
    load = bench.scheduler.load()
    assert (load.free_blocks, load.cached_blocks, load.held_blocks) == (16, 3, 0)


def test_changes_are_told_once() -> None:
    bench = Bench(num_blocks=4)
    bench.submit(make_submit("a", PROMPT[:9], max_tokens=1))
    bench.finish()
    came = bench.scheduler.snapshot().cache
    assert list(came.values()) == [True, True]
    assert bench.scheduler.snapshot().cache == {}
    bench.submit(make_submit("b", [1] * 13, max_tokens=1))
    bench.finish()
    gone = bench.scheduler.snapshot().cache
    assert {digest for digest, here in gone.items() if not here} == set(came)


@pytest.mark.parametrize("how", ["other salt", "bypass", "off"])
def test_no_reuse(how: str) -> None:
    bench = Bench(config=replace(CONFIG, enable_prefix_caching=how != "off"))
    bench.submit(make_submit("a", PROMPT, max_tokens=1))
    bench.finish()
    again = structs.replace(
        make_submit("b", PROMPT, max_tokens=3),
        cache_salt="mine" if how == "other salt" else "",
        bypass_prefix_cache=how == "bypass",
    )
    bench.submit(again)
    bench.finish()
    assert bench.prompts[again.key] == 0
    assert bench.output(again.key) == expected_output(PROMPT, 0, 3)
    assert (bench.scheduler.snapshot().cache == {}) == (how == "off")
    assert (bench.scheduler.counters()[messages.PREFIX_CACHE_QUERIES] == 0) == (how == "off")
    assert bench.idle()
