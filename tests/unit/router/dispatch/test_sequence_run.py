"""Requests through stub workers: pairs, resumption, refusals, cancels, deadlines, counters."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from observability import metrics
from protocol.errors import InvalidRequest, Overloaded, Unavailable
from protocol.ids import RequestKey, Role
from protocol.messages import ScoreEvent, TokenEvent
from protocol.states import FinishReason
from router.dispatch.attempt import Attempt, AttemptOutcome, TokenMerger
from router.text.text_stream import TextStream
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, until
from tests.support.stub_workers import StubFleet, StubWorker

PROMPT = [30, 31, 32, 33, 34, 35]  # longer than the threshold for local prefill


def expected(count: int) -> list[int]:
    return [20 + i for i in range(count)]


async def complete(front_ends: FrontEnds, **fields: Any) -> tuple[int, dict]:
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True} | fields
    return await front_ends.post("/v1/completions", body)


async def ids_of(front_ends: FrontEnds, **fields: Any) -> list[int]:
    status, body = await complete(front_ends, **fields)
    assert status == 200, body
    return body["choices"][0]["token_ids"]


def idle(front_ends: FrontEnds) -> bool:
    members = front_ends.router._workers.all()
    counts = [m.reservations for m in members]
    gauges = (metrics.REQUESTS_WAITING, metrics.REQUESTS_RUNNING)
    return (
        front_ends.router.num_requests == 0
        and all((c.in_flight, c.sequences, c.tokens, c.blocks) == (0, 0, 0, 0) for c in counts)
        and all(metric(front_ends, gauge) == 0 for gauge in gauges)
    )


def metric(front_ends: FrontEnds, which: metrics.Metric, **labels: str) -> float:
    return front_ends.router.metrics.value(which, **labels)


# --- pairs ----------------------------------------------------------------------------------------


async def test_both_workers_get_the_request_with_ticket_and_peer(front_ends: FrontEnds) -> None:
    prefill, decode = front_ends.fleet.workers
    assert await ids_of(front_ends, seed=5, temperature=0.5, top_k=3) == expected(8)
    for worker, peer in ((prefill, decode), (decode, prefill)):
        (submit,) = worker.submitted
        assert submit.peer == peer.ref
        assert submit.prompt_ids == tuple(PROMPT)
        assert submit.sampling.seed == 5
        assert submit.sampling.eos_token_ids == (2,)
        assert submit.ticket.sender_epoch == prefill.epoch
        assert submit.ticket.receiver_epoch == decode.epoch
        assert submit.ticket.num_blocks == 1
        submit.ticket.verify(b"secret")
        assert 0.0 < submit.ticket.lifetime_s == submit.time_left_s < 600.0
    assert idle(front_ends)
    assert not prefill.cancelled
    assert not decode.cancelled


async def test_clock_adjustments_do_not_move_a_deadline(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading is an hour later."""
    times = itertools.count(time.time(), 3600.0)
    monkeypatch.setattr(time, "time", lambda: next(times))
    worker = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        assert await ids_of(front_ends) == expected(8)
    assert 0.0 < worker.submitted[0].time_left_s < 600.0


async def test_short_prompts_stay_on_decode(front_ends: FrontEnds) -> None:
    prefill, decode = front_ends.fleet.workers
    assert await ids_of(front_ends, prompt=[30, 31]) == expected(8)
    assert prefill.submitted == []
    (submit,) = decode.submitted
    assert (submit.peer, submit.ticket) == (None, None)
    assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="short_prompt") == 1


async def test_without_prefill_workers_decode_does_it_all(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    decode = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        assert await ids_of(front_ends) == expected(8)
        assert decode.submitted[0].peer is None
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="no_prefill_ready") == 1


async def test_decode_computes_a_prompt_while_prefill_is_busier_than_itself(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    prefill, decode = await fleet.add(Role.PREFILL), await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, local_gain_s=0.5) as front_ends:
        (busy,) = front_ends.router._workers.ready(Role.PREFILL)
        (other,) = front_ends.router._workers.ready(Role.DECODE)
        busy.reservations.reserve(RequestKey("long", 0), tokens=10**6, blocks=0)
        assert await ids_of(front_ends) == expected(8)
        assert decode.submitted[0].peer is None
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="prefill_busy") == 1
        other.reservations.reserve(RequestKey("local", 0), tokens=10**6, blocks=0)
        decode.accepting = asyncio.Event()
        answer = asyncio.create_task(ids_of(front_ends))
        await until(lambda: prefill.submitted)
        assert other.reservations.tokens == 10**6  # what prefill computes is none of decode's
        decode.accepting.set()
        assert await answer == expected(8)
        assert [submit.peer for submit in decode.submitted] == [None, prefill.ref]


async def test_an_end_at_token_one_never_reaches_decode(front_ends: FrontEnds) -> None:
    prefill, decode = front_ends.fleet.workers
    prefill.script = lambda submit: [2]
    status, body = await complete(front_ends)
    assert status == 200
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 1
    await until(lambda: decode.cancelled)
    assert decode.cancelled[0] == decode.submitted[0].key
    assert not decode.running


async def test_one_token_means_one_token(front_ends: FrontEnds) -> None:
    assert await ids_of(front_ends, max_tokens=1) == expected(1)


async def test_an_unset_seed_is_filled_in_differently_each_time(front_ends: FrontEnds) -> None:
    await ids_of(front_ends)
    await ids_of(front_ends)
    seeds = {submit.sampling.seed for submit in front_ends.fleet.workers[1].submitted}
    assert len(seeds) == 2


async def test_requests_spread_over_idle_workers(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    gate = asyncio.Event()  # none ends before all have come
    decodes = [await fleet.add(Role.DECODE, gate=gate) for _ in range(4)]
    async with make_front_ends(fleet) as front_ends:
        asked = [asyncio.create_task(ids_of(front_ends)) for _ in range(40)]
        await until(lambda: sum(len(worker.submitted) for worker in decodes) == 40)
        gate.set()
        await asyncio.gather(*asked)
        assert [len(worker.submitted) for worker in decodes] == [10, 10, 10, 10]


# --- losing workers -------------------------------------------------------------------------------


async def cut_after(worker: StubWorker, tokens: int, front_ends: FrontEnds, how: str) -> None:
    """Take a worker away once it has emitted some tokens."""
    await until(lambda: metric(front_ends, metrics.TIME_TO_FIRST_TOKEN) > 0)
    await asyncio.sleep(worker.delay_s * tokens)
    if how == "dies":
        await worker.stop()
    elif how == "stream breaks":
        worker.break_streams()
    else:
        worker.silent = True
        for task in list(worker.running.values()):
            task.cancel()


@pytest.mark.parametrize("how", ["dies", "stream breaks", "falls silent"])
async def test_a_lost_decode_worker_repeats_and_drops_no_token(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, how: str
) -> None:
    await fleet.add(Role.PREFILL)
    first = await fleet.add(Role.DECODE, delay_s=0.01)
    async with make_front_ends(fleet, silence_s=0.5) as front_ends:
        running = asyncio.create_task(ids_of(front_ends, max_tokens=40, seed=9))
        await cut_after(first, 5, front_ends, how)
        second = await fleet.add(Role.DECODE, delay_s=0.001)
        front_ends.router.set_workers(fleet.refs)
        assert await running == expected(40)
        resumed = [s for w in (first, second) for s in w.submitted if s.key.attempt > 0]
        assert resumed
        for submit in resumed:
            assert submit.sampling.seed == 9
            assert list(submit.output_ids) == expected(len(submit.output_ids))
            assert len(submit.output_ids) > 0
        assert idle(front_ends)


async def test_a_lost_prefill_worker_before_token_one(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    slow = await fleet.add(Role.PREFILL, prefill_delay_s=30)
    decode = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        running = asyncio.create_task(ids_of(front_ends))
        await until(lambda: slow.submitted and decode.submitted)
        await slow.stop()
        assert await running == expected(8)
        assert decode.submitted[0].key in decode.cancelled
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="no_prefill_ready") == 1
        assert metric(front_ends, metrics.RESUMES, cause="prefill_lost") == 1


async def test_a_prefill_worker_lost_after_its_commit_does_not_matter(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    prefill = await fleet.add(Role.PREFILL)
    decode = await fleet.add(Role.DECODE, delay_s=0.01)
    async with make_front_ends(fleet) as front_ends:
        running = asyncio.create_task(ids_of(front_ends, max_tokens=30))
        await until(lambda: metric(front_ends, metrics.TIME_TO_FIRST_TOKEN) > 0)
        await asyncio.sleep(0.05)
        await prefill.stop()
        assert await running == expected(30)
        assert len(decode.submitted) == 1


@pytest.mark.parametrize("known", [[], [20, 21, 22]], ids=["first", "resumed"])
@pytest.mark.parametrize("first_came", [False, True])
async def test_a_lost_prefill_worker_matters_while_its_token_is_missing(
    front_ends: FrontEnds, known: list[int], first_came: bool
) -> None:
    """Decode has gone on from a token that the router has never seen."""
    prefill = front_ends.fleet.refs[0]
    merger, key = TokenMerger(), RequestKey("r", 1)
    merger.output_ids += known
    output = Taken()
    attempt = Attempt(key, merger=merger, output=output, remote=True, holder="d", clock=time.time)
    first = len(known)
    attempt.on_token(TokenEvent(key=key, index=first + 1, token=31), Role.DECODE)
    if first_came:
        attempt.on_token(TokenEvent(key=key, index=first, token=30), Role.PREFILL)
    attempt.on_lost(prefill, "gone")
    ended = attempt.result()
    if first_came:
        assert (ended, output.tokens) == (None, [30, 31])
    else:
        assert ended is not None
        assert (ended.outcome, ended.worker_id, ended.retriable) == (
            AttemptOutcome.LOST,
            prefill.worker_id,
            True,
        )
        assert output.tokens == []


class Taken:
    """An output that only notes its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def take(self, event: TokenEvent) -> bool:
        self.tokens.append(event.token)
        return False

    def score(self, event: ScoreEvent) -> None:
        raise AssertionError("nothing is scored")


async def test_a_retriable_failure_moves_on_to_another_worker(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    bad = await fleet.add(Role.DECODE, fail_after=3)
    good = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        for _ in range(8):
            assert await ids_of(front_ends) == expected(8)
        assert bad.submitted
        assert len(good.submitted) == 8
        assert metric(front_ends, metrics.RESUMES, cause="decode_failed") == len(bad.submitted)
        assert all(len(s.output_ids) == 3 for s in good.submitted if s.key.attempt)


async def test_a_final_failure_reaches_the_client(front_ends: FrontEnds) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 3, False
    decode.fail_error = InvalidRequest("no good", param="prompt")
    status, body = await complete(front_ends)
    assert (status, body["error"]["param"]) == (400, "prompt")
    await until(lambda: idle(front_ends))


async def test_a_defect_in_one_output_ends_that_output_alone(
    front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push

    def broken(self: TextStream, token: int, finish: FinishReason | None) -> str:
        if token == 23:
            raise ZeroDivisionError("no such text")
        return push(self, token, finish)

    monkeypatch.setattr(TextStream, "push", broken)
    for worker in front_ends.fleet.workers:
        worker.script = lambda s: [50] * 8 if s.sampling.max_tokens == 8 else [20, 21, 22, 23, 24]
    ((status, body), (other, _)) = await asyncio.gather(
        complete(front_ends, max_tokens=5), complete(front_ends, max_tokens=8)
    )
    assert (status, other) == (500, 200)
    assert body["error"]["message"] == "ZeroDivisionError: no such text"
    assert (
        sum(len(worker.submitted) for worker in front_ends.fleet.workers) == 4
    )  # no other attempt
    assert idle(front_ends)


async def test_an_output_that_came_in_time_waits_for_no_timeline_past_its_deadline(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    monkeypatch.setattr(Attempt, "_add_spans", lambda *_: None)  # prefill never reports
    async with make_front_ends(fleet, timeline_wait_s=60.0) as front_ends:
        status, _ = await complete(front_ends, timeline=True, timeout=3)
        assert status == 200


async def test_attempts_are_bounded(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    worker = await fleet.add(Role.DECODE, fail_after=0)
    async with make_front_ends(fleet, max_attempts=3) as front_ends:
        request = {"prompt": PROMPT}
        async with front_ends.http.post(
            front_ends.url + "/v1/completions", json=request
        ) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["code"] == "unavailable"
        assert [submit.key.attempt for submit in worker.submitted] == [0, 1, 2]


async def test_an_accepted_request_waits_for_a_new_worker_but_not_for_ever(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.01)
    async with make_front_ends(fleet, resume_wait_s=0.3) as front_ends:
        running = asyncio.create_task(complete(front_ends, max_tokens=100))
        await cut_after(worker, 2, front_ends, "dies")
        status, body = await running
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert idle(front_ends)


async def test_another_incarnation_is_another_worker(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        worker.epoch += 1  # restarted behind our back
        worker.break_streams()
        await until(lambda: not front_ends.router.ready)
        await asyncio.sleep(0.2)
        assert not front_ends.router.ready


# --- refusals -------------------------------------------------------------------------------------


async def test_a_full_worker_is_passed_over(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    full = await fleet.add(Role.DECODE, refuse=Overloaded("full", retry_after_s=3))
    free = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        for _ in range(6):
            assert await ids_of(front_ends) == expected(8)
        assert len(free.submitted) == 6
        assert full.submitted == []
        assert idle(front_ends)


async def test_when_all_are_full_the_client_is_told_when_to_come_back(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    for _ in range(2):
        await fleet.add(Role.DECODE, refuse=Overloaded("full", retry_after_s=7))
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": PROMPT}
        async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "7"


async def test_a_refusal_by_prefill_cancels_decode_and_goes_on(front_ends: FrontEnds) -> None:
    prefill, decode = front_ends.fleet.workers
    prefill.refuse = Unavailable("draining")
    assert await ids_of(front_ends) == expected(8)
    assert [submit.key.attempt for submit in decode.submitted] == [0, 1]
    assert decode.submitted[0].key in decode.cancelled
    assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="no_prefill_ready") == 1


async def test_an_invalid_request_is_not_tried_elsewhere(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    error = InvalidRequest("prompt is odd", param="prompt")
    workers = [await fleet.add(Role.DECODE, refuse=error) for _ in range(2)]
    async with make_front_ends(fleet) as front_ends:
        status, body = await complete(front_ends)
        assert (status, body["error"]["message"]) == (400, "prompt is odd")
        assert all(worker.submitted == [] for worker in workers)


async def test_no_worker_at_all(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": PROMPT}
        async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
        status, body = await complete(front_ends, prompt=[])
        assert status == 400  # what is wrong anyway is said first


async def test_prompts_over_the_pool_name_the_field(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE, num_blocks=4)  # 64 tokens; the context is 512
    async with make_front_ends(fleet) as front_ends:
        async with front_ends.http.get(front_ends.url + "/v1/models/tiny") as response:
            assert (await response.json())["max_model_len"] == 64
        assert await ids_of(front_ends, prompt=[30] * 63, max_tokens=1) == expected(1)
        for length in (64, 65, 200):
            status, body = await complete(front_ends, prompt=[30] * length, max_tokens=1)
            assert (status, body["error"]["param"]) == (400, "prompt")
            assert body["error"]["code"] == "context_length_exceeded"
            assert "KV pool" in body["error"]["message"]


# --- ends -----------------------------------------------------------------------------------------


async def test_an_output_that_ends_just_as_its_deadline_passes_has_ended(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[asyncio.Timeout] = []
    timeout_at = asyncio.timeout_at

    def kept(when: float) -> asyncio.Timeout:
        deadlines.append(timeout_at(when))
        return deadlines[-1]

    monkeypatch.setattr(asyncio, "timeout_at", kept)
    worker = await fleet.add(Role.DECODE)
    worker.gate = asyncio.Event()
    async with make_front_ends(fleet) as front_ends:
        asked = asyncio.create_task(complete(front_ends))
        (member,) = front_ends.router._workers.all()
        await until(lambda: any(a._merger.output_ids for a, _ in member._sinks.values()))
        ((attempt, _),) = member._sinks.values()
        (deadline,) = [d for d in deadlines if d._task.get_coro().__qualname__ == "SequenceRun.run"]
        deadline.reschedule(0.0)
        last = TokenEvent(key=attempt.key, index=1, token=21, finish=FinishReason.STOP)
        attempt.on_token(last, Role.DECODE)
        status, body = await asked
        assert status == 200
        assert body["choices"][0]["token_ids"] == [20, 21]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert idle(front_ends)


async def test_a_deadline_ends_the_request_everywhere(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.05)
    async with make_front_ends(fleet) as front_ends:
        start = time.monotonic()
        status, body = await complete(front_ends, max_tokens=400, timeout=1)  # all take 20 s
        assert time.monotonic() - start > 0.9
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: worker.cancelled and not worker.running)
        await until(lambda: idle(front_ends))


async def test_a_stop_string_ends_the_workers_part_too(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.005)
    worker.script = lambda submit: letters("abcdefgh" * 60)
    async with make_front_ends(fleet) as front_ends:
        status, body = await complete(front_ends, max_tokens=400, stop=["def"])
        assert status == 200
        assert body["choices"][0]["text"] == "abc"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 6
        await until(lambda: worker.cancelled and not worker.running)
        status, body = await complete(front_ends, max_tokens=400, stop=["def"], timeline=True)
        (decode,) = [s for s in body["timeline"]["spans"] if s["phase"] == "decode"]
        assert decode["note"] == "cut at a stop string"


async def test_mass_cancels_leave_nothing_behind(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """200 requests dropped at random moments: every count back to zero, nothing left running."""
    for _ in range(2):
        await fleet.add(Role.PREFILL, prefill_delay_s=0.005)
        await fleet.add(Role.DECODE, delay_s=0.002)
    async with make_front_ends(fleet) as front_ends:

        async def one(i: int) -> None:
            task = asyncio.create_task(complete(front_ends, max_tokens=20))
            await asyncio.sleep((i * 37 % 50) / 1000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(i) for i in range(200)))
        await until(lambda: idle(front_ends))
        await until(lambda: not any(worker.running for worker in fleet.workers))
        outcomes = sum(
            metric(front_ends, metrics.REQUEST_SUCCESS, finished_reason=reason)
            for reason in ("stop", "length")
        ) + metric(front_ends, metrics.REQUEST_FAILURES, door="http", code="cancelled")
        arrived = metric(front_ends, metrics.REQUESTS, door="http", endpoint="completions")
        assert outcomes == arrived
        assert metric(front_ends, metrics.REQUESTS_RUNNING) == 0
        assert metric(front_ends, metrics.REQUESTS_WAITING) == 0


async def test_a_cancel_never_overtakes_its_submit(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    accepting = asyncio.Event()
    worker = await fleet.add(Role.DECODE, delay_s=1, accepting=accepting)
    async with make_front_ends(fleet) as front_ends:
        task = asyncio.create_task(complete(front_ends))
        await until(lambda: worker.num_submits)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: idle(front_ends))
        assert worker.cancelled == []  # not before the worker has it
        accepting.set()
        await until(lambda: worker.cancelled)
        assert not worker.running


# --- the set of workers ---------------------------------------------------------------------------


async def test_a_leaving_worker_finishes_what_it_has(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, caplog: pytest.LogCaptureFixture
) -> None:
    old = await fleet.add(Role.DECODE, delay_s=0.01)
    async with make_front_ends(fleet) as front_ends:
        running = asyncio.create_task(ids_of(front_ends, max_tokens=30))
        await until(lambda: old.submitted)
        new = await fleet.add(Role.DECODE)
        front_ends.router.set_workers([new.ref])
        await until(lambda: front_ends.router.ready)
        assert await ids_of(front_ends) == expected(8)
        assert len([submit for submit in new.submitted if not submit.live]) == 1
        assert await running == expected(30)
        await until(lambda: len(front_ends.router._workers.all()) == 1)
        assert "worker lost" not in caplog.messages  # not an incident
        await asyncio.sleep(0)
        moving = [t for t in asyncio.all_tasks() if "Mover" in t.get_coro().__qualname__]
        assert moving == []  # it was tried, in vain, for as long as the output ran


async def test_a_worker_that_is_named_again_stays(front_ends: FrontEnds) -> None:
    refs = front_ends.fleet.refs
    front_ends.router.set_workers([])
    front_ends.router.set_workers(refs)
    await front_ends.wait_ready(1, 1)
    assert await ids_of(front_ends) == expected(8)


async def test_a_worker_that_is_not_ready_gets_nothing(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    from protocol.states import WorkerState

    ready = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        starting = await fleet.add(Role.DECODE, state=WorkerState.STARTING)
        front_ends.router.set_workers(fleet.refs)
        await asyncio.gather(*(ids_of(front_ends) for _ in range(6)))
        assert starting.submitted == []
        assert len(ready.submitted) == 6
        starting.state = WorkerState.READY
        await front_ends.wait_ready(2)
