"""Prompt chunks beside streams whose longest gap between tokens is promised."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from decode_worker.chunking import (
    _FREE_GROWTH,
    _GAP_SHARE,
    _KEPT_SHARE,
    _MAX_LATE_S,
    _ROW_TILE,
    _SPARE_S,
    _UNMEASURED_CHUNK,
    MAX_BARE,
    MIN_CHUNK,
    PromptBudget,
    WaitingWork,
    needed,
    stretched,
)
from decode_worker.commit_delays import CommitDelays
from decode_worker.scheduler import DecodeScheduler
from engine.config import EngineConfig
from engine.kv.allocator import BlockAllocator
from kv_transfer.config import TransferConfig
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role
from tests.support.blocks import FINGERPRINT
from tests.support.decode_bench import Bench, make_submit
from worker_runtime.config import WorkerConfig
from worker_runtime.ranks import Ranks
from worker_runtime.scheduling.messages import CommitAnnounced
from worker_runtime.scheduling.prompt_order import WaitingPrompt
from worker_runtime.scheduling.step_model import StepWork
from worker_runtime.worker import Worker, WorkerSettings

BASE_S, TOKEN_S = 0.005, 20e-6
TARGET_S = 0.012


def bench_of(*, target_s: float = TARGET_S, max_s: float = 0.0, measured: bool = True) -> Bench:
    config = WorkerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        watermark=0.0,
        target_step_s=target_s,
        max_step_s=max_s,
    )
    bench = Bench(num_blocks=2000, config=config)
    for number in range(64 if measured else 0):
        tokens = 64 + 7 * number
        shape = StepWork(num_decodes=1, num_prompt_tokens=tokens)
        bench.scheduler._inflight.model.add(shape, BASE_S + (tokens + 1) * TOKEN_S)
    return bench


def chunk_beside(
    bench: Bench, *gaps_s: float | None, remote: bool = False, first_s: float | None = None
) -> int:
    """Prompt tokens of the first step that runs a long prompt beside streams of these promises."""
    for number, gap_s in enumerate(gaps_s):
        submit = make_submit(f"stream{number}", [number], max_tokens=50, remote=remote)
        bench.submit(replace(submit, gap_s=gap_s))
        bench.turn()
    prompt = make_submit("prompt", list(range(2000)), max_tokens=1)
    bench.submit(replace(prompt, first_s=first_s))
    planned = len(bench.planned)
    bench.turn()
    batch = bench.planned[planned]
    return max(len(step.tokens) for step in batch.sequences)


def fitting(seconds: float, num_decodes: int = 1) -> int:
    """Prompt tokens of a step of so many seconds, in whole tiles of rows."""
    num_tokens = round((seconds - BASE_S) / TOKEN_S) - num_decodes
    return num_tokens - (num_decodes + num_tokens) % _ROW_TILE


@pytest.mark.parametrize(
    ("gaps_s", "step_s"),
    [
        ((None,), TARGET_S),
        ((0.1, None), TARGET_S),
        ((0.010,), 0.010 * _GAP_SHARE),
        ((None, 0.011, 0.010, 0.1), 0.010 * _GAP_SHARE),
    ],
)
def test_chunks_keep_the_strictest_promise_in_the_batch(gaps_s, step_s):
    assert chunk_beside(bench_of(), *gaps_s) == fitting(step_s, len(gaps_s))


def test_a_promise_alone_bounds_steps_without_a_target():
    bench = bench_of(target_s=0.0)
    assert chunk_beside(bench, None) == 511
    assert chunk_beside(bench_of(target_s=0.0), 0.010) == fitting(0.0085)


def test_a_promise_below_a_step_alone_leaves_the_smallest_chunk():
    assert chunk_beside(bench_of(), 0.004) == MIN_CHUNK


def test_unmeasured_steps_take_the_smallest_chunk_beside_a_promise():
    assert chunk_beside(bench_of(measured=False), None) == _UNMEASURED_CHUNK
    assert chunk_beside(bench_of(measured=False), 0.5) == _UNMEASURED_CHUNK
    assert chunk_beside(bench_of(measured=False), 0.010) == MIN_CHUNK


def test_a_stream_being_received_waits_for_one_step_and_its_own():
    bench = bench_of()
    bench.submit(replace(make_submit("strict", [1], remote=True), gap_s=0.018))
    bench.turn()
    assert bench.reserves  # granted, not committed
    assert chunk_beside(bench) == fitting(0.009 * _GAP_SHARE, 0)


def test_a_finished_stream_holds_nothing_up():
    bench = bench_of()
    bench.submit(replace(make_submit("strict", [1], max_tokens=2), gap_s=0.010))
    for _ in range(6):
        bench.turn()
    assert chunk_beside(bench, None) == fitting(TARGET_S)


def test_the_load_reports_a_decode_step():
    bench = bench_of()
    assert bench.scheduler.load().decode_step_s == 0.0
    bench.submit(make_submit("a", [1], max_tokens=5))
    for _ in range(8):
        bench.turn()
    assert bench.scheduler.load().running == 0
    assert 0.0 <= bench.scheduler.load().decode_step_s <= 1.0


def receiving(bench: Bench, num_tokens: int = 1) -> RequestKey:
    """A stream whose KV is on its way."""
    prompt = list(range(10**6, 10**6 + num_tokens))
    key = bench.submit(make_submit("remote", prompt, remote=True, max_tokens=50))
    bench.turn()
    assert bench.reserves
    return key


@pytest.mark.parametrize(
    ("due_s", "step_s"), [(0.008, 0.008), (0.02, TARGET_S), (-_MAX_LATE_S - 0.001, TARGET_S)]
)
def test_a_step_ends_where_the_next_commit_is_due(due_s, step_s):
    bench = bench_of()
    next_plan = bench.now + 2.0
    key = receiving(bench)
    bench.tell(CommitAnnounced(key=key, at=next_plan + due_s - CommitDelays().expected_s(1)))
    assert chunk_beside(bench) == fitting(step_s, 0)


def test_a_step_ends_where_commits_were_late_before():
    """Those seen came 5 ms after their announced time, and 1 us a token of their KV."""
    bench = bench_of()
    for number in range(8):
        prompt = list(range(number * 5000, number * 5000 + 1 + 600 * number))
        key = bench.submit(make_submit(f"remote{number}", prompt, remote=True, max_tokens=2))
        bench.turn()
        bench.tell(CommitAnnounced(key=key, at=bench.now - 0.005 - 1e-6 * len(prompt)))
        bench.serve_reserves()
        while bench.turn():
            pass
    next_plan = bench.now + 2.0
    bench.tell(CommitAnnounced(key=receiving(bench, 3001), at=next_plan + 0.001))
    assert chunk_beside(bench) == fitting(0.009, 0)


@pytest.mark.parametrize(
    ("streams", "target_s", "bare"), [(0, TARGET_S, 0), (1, TARGET_S, MAX_BARE), (1, 0.0055, 0)]
)
def test_a_late_commit_is_waited_for_without_prompt_tokens_and_then_with_the_fewest(
    streams, target_s, bare
):
    """A step without decode rows or prompt tokens would be none. Where steps have the fewest
    anyway, nothing would make up for one without."""
    bench = bench_of(target_s=target_s)
    for number in range(streams):
        bench.submit(make_submit(f"stream{number}", [1], max_tokens=50))
        bench.turn()
    key = receiving(bench)
    bench.submit(make_submit("prompt", list(range(2000)), max_tokens=1))
    chunks = []
    for _ in range(6):
        bench.tell(CommitAnnounced(key=key, at=bench.now + 0.99))
        bench.turn()
        steps = bench.planned[-1].sequences
        chunks.append(sum(len(step.tokens) for step in steps) - streams)
    assert chunks == ([0] * bare + [MIN_CHUNK]) * (6 // (bare + 1))


@pytest.mark.parametrize(
    ("prompt", "output", "num_tokens"),
    [
        (MIN_CHUNK, (), MIN_CHUNK),  # its end
        (MIN_CHUNK + 1, (), 0),
        (2000, (3, 4, 5), MIN_CHUNK),  # its client has waited, too
    ],
)
def test_what_is_not_left_out_of_a_step_that_a_commit_waits_for(prompt, output, num_tokens):
    bench = bench_of()
    bench.submit(make_submit("stream", [1], max_tokens=50))
    bench.turn()
    key = receiving(bench)
    bench.submit(make_submit("prompt", list(range(prompt)), output=output))
    bench.tell(CommitAnnounced(key=key, at=bench.now + 0.99))
    bench.turn()
    assert [len(step.tokens) for step in bench.planned[-1].sequences[1:]] == (
        [num_tokens] * (num_tokens > 0)
    )


def test_a_step_with_a_committed_stream_does_not_grow():
    model = bench_of().scheduler._inflight.model
    budget = PromptBudget(WorkerConfig(target_step_s=TARGET_S, max_step_s=0.016), model)
    rate = 0.98 * budget._step_rate(0.016, [0])
    count = int(rate * _KEPT_SHARE * (0.2 - _SPARE_S))
    waiting = WaitingWork(num_tokens=count, start=0, prompts=[(count, WaitingPrompt(1.0, 0.0))])
    more = {"contexts": [0], "gaps_s": [], "arriving": [], "waiting": waiting}
    chunks = [budget.take(waited_s=waited_s, **more) for waited_s in (0.0, 0.001)]
    assert chunks == [fitting(0.016), fitting(TARGET_S - 0.001)]


@pytest.mark.parametrize(
    ("contexts", "due", "step_s"),
    [
        ([], [], 0.014),
        ([0], [], TARGET_S),
        ([], [(0.010, math.inf)], 0.010),
        ([], [(0.1, 0.02)], 0.01 * _GAP_SHARE),
    ],
)
def test_a_step_of_prompts_alone_holds_no_stream_up(contexts, due, step_s):
    """It takes twice the most, but a sequence that is being received waits for no longer step."""
    model = bench_of().scheduler._inflight.model
    budget = PromptBudget(WorkerConfig(target_step_s=TARGET_S, max_step_s=0.007), model)
    waiting = WaitingWork(num_tokens=4000, start=0)
    more = {"contexts": contexts, "gaps_s": [], "waited_s": 0.0, "waiting": waiting}
    assert budget.take(arriving=due, **more) == fitting(step_s, len(contexts))


def test_steps_that_alone_exceed_the_target_take_the_fewest_prompt_tokens():
    bench = bench_of(target_s=0.004)
    for chunk in [chunk_beside(bench, None), *(chunk_beside(bench) for _ in range(3))]:
        assert chunk == MIN_CHUNK


def test_the_first_step_of_a_committed_stream_makes_up_for_its_wait():
    bench = bench_of()
    receiving(bench)
    bench.submit(make_submit("prompt", list(range(2000)), max_tokens=1))
    bench.turn()
    bench.serve_reserves()
    chunks = []
    for _ in range(2):
        bench.turn()
        chunks.append(max(len(step.tokens) for step in bench.planned[-1].sequences))
    assert chunks == [1, fitting(TARGET_S)]


def test_a_prompt_that_is_due_passes_a_long_one_that_does_not_starve():
    """Turns take a second; prompts come first that have waited for 5 s."""
    bench = bench_of()
    rate = bench.scheduler.load().prompt_tokens_per_second
    bench.submit(make_submit("long", list(range(int(rate / 4))), max_tokens=1))
    bench.now += 3.0
    for number in range(3):
        first = 10_000 * (number + 1)
        due = make_submit(f"due{number}", list(range(first, first + 100)), max_tokens=1)
        bench.submit(replace(due, first_s=1.1))
        bench.turn()
        assert (bench.planned[-1].sequences[0].tokens[0] == first) == (number < 2)


def test_a_stream_whose_kv_is_computed_again_comes_before_prompts_that_are_due():
    bench = bench_of()
    due = make_submit("due", list(range(100)), max_tokens=1)
    bench.submit(replace(due, first_s=1.1))
    stream = list(range(3000, 4000))
    bench.submit(make_submit("stream", stream, output=(1, 2), attempt=1, max_tokens=5))
    bench.turn()
    assert bench.planned[-1].sequences[0].tokens[0] == 3000


def test_the_load_reports_the_rate_of_prompts_at_this_length_of_step():
    assert bench_of(measured=False).scheduler.load().prompt_tokens_per_second == 0.0
    bench = bench_of()
    tokens = fitting(TARGET_S, 0)
    expected = _KEPT_SHARE * tokens / (BASE_S + tokens * TOKEN_S)
    assert bench.scheduler.load().prompt_tokens_per_second == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("waiting", "factor"), [(0, 1.0), (300, 1.0), (507, 1.3), (10**6, 4 / 3)])
def test_steps_stretch_with_the_work_that_waits(waiting, factor):
    """10,000 tokens a second: 300 tokens are the 0.03 s of work that change nothing."""
    took = stretched(0.012, 0.016, waiting, 10_000.0)
    assert took == pytest.approx(0.012 * factor)


def test_steps_do_not_stretch_before_the_rate_is_known_nor_shrink():
    assert stretched(0.012, 0.016, 10**6, 0.0) == 0.012
    assert stretched(0.012, 0.010, 10**6, 1000.0) == 0.012


@pytest.mark.parametrize(
    ("first_s", "gap_s", "step_s"),
    [
        (0.2, None, 0.008 * _FREE_GROWTH),  # bears 17,300 tokens a second
        (0.14, None, 0.0109),  # 18,200
        (0.14, 0.010, 0.010 * _GAP_SHARE),
        (0.05, None, 0.008 * _FREE_GROWTH),  # late in any case
    ],
)
def test_steps_grow_for_first_tokens_but_not_beyond_a_promise(first_s, gap_s, step_s):
    """Of 2,000 tokens; a turn of the bench takes a second before its step is planned."""
    bench = bench_of(target_s=0.008, max_s=0.016)
    assert chunk_beside(bench, gap_s, first_s=1.0 + first_s) == fitting(step_s)


@pytest.mark.parametrize(
    ("waiting", "start_s", "expected"),
    [
        ([], 0.0, 0),
        ([(1000, 0.0, None)], 0.0, 0),
        ([(2000, 0.0, None)], 0.0, 1),
        ([(2000, 0.0, None)], 0.02, 2),
        ([(1000, 0.05, None), (1000, 0.0, None)], 0.0, 1),  # the second has them before it
        ([(1400, 0.05, None), (600, 0.0, None)], 0.0, 1),
        ([(1000, 0.0, 0.1)], 0.0, 3),  # promised
        ([(3000, 0.0, None)], 0.0, 0),  # late in any case, within 0.5 s in usual steps
        ([(3000, 0.0, None), (100, 0.0, None)], 0.0, 0),
        ([(5500, 0.0, None)], 0.0, 1),  # within 0.5 s
        ([(1000, 9.0, None)], 0.0, 0),  # beyond all aims
    ],
)
def test_steps_are_as_long_as_first_tokens_need(waiting, start_s, expected):
    lengths, rates = [0.010, 0.012, 0.014, 0.016], [10_000.0, 12_000.0, 14_000.0, 16_000.0]
    prompts = [
        (count, WaitingPrompt(1.0, waited_s, promised_s)) for count, waited_s, promised_s in waiting
    ]
    work = WaitingWork(num_tokens=0, start=0, prompts=prompts, start_s=start_s)
    assert needed(lengths, rates.__getitem__, work) == lengths[expected]


@pytest.mark.parametrize(
    ("target_s", "graph_tokens", "num_seqs", "held_tokens"),
    [
        (0.01, 768, 8, 768),
        (0.01, 0, 8, 2048),  # a CPU, or no graphs for prompts
        (0.0, 768, 8, 2048),  # nothing bounds its steps
        (0.01, 4096, 8, 2048),
        (0.01, 768, 1000, 1000),  # decode rows alone have graphs of their own
    ],
)
def test_steps_with_a_target_are_no_larger_than_graphs(
    target_s, graph_tokens, num_seqs, held_tokens
):
    config = WorkerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=2048, fill_tokens=1800, target_step_s=target_s
    )
    other = dataclasses.replace(config, max_num_batched_tokens=2049)
    worker = Worker(
        WorkerSettings(
            worker_id="w0",
            role=Role.DECODE,
            schedulers={Role.PREFILL: PrefillScheduler, Role.DECODE: DecodeScheduler},
            engine=EngineConfig(model_path="none"),
            worker=config,
            other=other,
            transfer=TransferConfig(),
            secret=b"secret",
        )
    )
    step_rows = (256, graph_tokens) if graph_tokens else ()
    executor: Any = SimpleNamespace(step_rows=step_rows, fingerprint=FINGERPRINT)
    worker.ranks = Ranks(executor=executor, plane=Any, tiers=Any, group=None)
    schedulers = worker._new_schedulers(BlockAllocator(8, 4), None, None)
    held = schedulers[Role.DECODE]._config
    assert held.max_num_batched_tokens == held_tokens
    assert held.fill_tokens == min(1800, held_tokens)
    assert (held.target_step_s, held.max_num_seqs) == (target_s, num_seqs)
    assert schedulers[Role.PREFILL]._config == other  # its steps outlast their launches
