"""The admission queue: when requests may go, when they are refused, and that nothing leaks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml
from grpc import aio

from observability import metrics
from observability.clock import Peak
from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, PermissionDenied
from protocol.errors import Unavailable as Late
from protocol.ids import Role
from protocol.messages import WorkerLoad
from protocol.wire import inference_pb2 as pb
from router.admission.load_estimate import LoadEstimate
from router.admission.queue import TicketState
from router.auth.keys import ANYONE, Caller, ServiceTier, hashed, new_key, tier_name
from tests.support.admission import Bench, Worker, soon
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, status_of, until
from tests.support.stub_workers import StubFleet


async def test_reports_that_come_together_are_looked_at_once() -> None:
    """A hundred workers report a hundred times a second each."""
    bench = Bench()
    first, second = bench.ticket(160), bench.ticket(130)
    await first.wait()
    waiting = asyncio.create_task(second.wait())
    await soon()
    for backlog in (160, 140, 120):
        before = bench.workers.looks
        for _ in range(100):
            bench.workers.report(waiting_tokens=backlog)
        await soon()
        assert bench.workers.looks - before == 1
    assert not waiting.done()
    first.started()
    await waiting
    for _ in range(100):
        bench.workers.report()
    before = bench.workers.looks
    await soon()
    assert bench.workers.looks == before, "no request waits"


async def test_workers_get_a_window_of_work_and_the_rest_waits() -> None:
    bench = Bench()
    tickets = [bench.ticket(60) for _ in range(4)]
    await tickets[0].wait()
    await tickets[1].wait()  # 60 tokens are out, 0.6 s: less than the window
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets[2:]]
    await soon()
    assert bench.waiting == (2, 120)
    tickets[0].started()
    await soon()
    assert [task.done() for task in tasks] == [True, False]
    tickets[1].end(5)
    await soon()
    assert tasks[1].done()
    assert bench.waiting == (0, 0)
    assert tickets[0].spans("r") == []
    assert [placed.span.phase for placed in tickets[2].spans("r")] == ["queue"]
    for ticket in tickets:
        ticket.end(5)
    assert bench.idle


async def test_what_other_routers_have_sent_counts_too_but_one_may_always_go() -> None:
    bench = Bench()
    bench.workers.report(waiting_tokens=500)
    first, second = bench.ticket(10), bench.ticket(10)
    await first.wait()
    task = asyncio.create_task(second.wait())
    await soon()
    assert not task.done()
    bench.workers.report(waiting_tokens=50)
    await soon()
    assert task.done()


async def test_what_is_cached_is_no_work_to_wait_for() -> None:
    bench = Bench()
    tickets = [bench.ticket(90), bench.ticket(80, cached=70), bench.ticket(200, cached=190)]
    for ticket in tickets[:2]:
        await ticket.wait()  # 100 tokens to compute, 1 s
    task = asyncio.create_task(tickets[2].wait())
    await soon()
    assert (task.done(), bench.waiting) == (True, (0, 0))
    late = bench.ticket(300, cached=200, left_s=1.05)  # 110 are ahead: 1.1 s
    with pytest.raises(Late, match=r"1\.1 s of work"):
        await late.wait()
    waiting = asyncio.create_task(bench.ticket(300, cached=230).wait())
    await soon()
    assert bench.waiting == (1, 70)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for ticket in tickets:
        ticket.end(0)
    assert bench.idle


async def test_what_is_cached_needs_room_all_the_same() -> None:
    bench = Bench()
    bench.workers.decode.capacity_tokens = 150
    first, second = bench.ticket(100, cached=100), bench.ticket(100, cached=100)
    await first.wait()
    task = asyncio.create_task(second.wait())
    await soon()
    assert (task.done(), bench.waiting) == (False, (1, 1))
    first.started()
    await soon()
    assert task.done()
    second.end(0)
    assert bench.idle


async def test_a_keys_waiting_tokens_are_shared_out_over_routers() -> None:
    bench = Bench()
    caller = Caller(name="k", max_queued_tokens=100)
    bench.queue.num_routers = 2
    bench.workers.report(waiting_tokens=500)
    first = bench.ticket(10, caller)
    await first.wait()
    one = asyncio.create_task(bench.ticket(60, caller).wait())  # more than 50, but the only one
    await soon()
    with pytest.raises(Overloaded, match="60 of 50 tokens"):
        await bench.ticket(1, caller).wait()
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    first.end(0)


async def test_decode_without_room_holds_prompts_back() -> None:
    bench = Bench()
    bench.workers.decode.capacity_tokens = 32
    first, second = bench.ticket(20), bench.ticket(20)
    await first.wait()
    task = asyncio.create_task(second.wait())
    await soon()
    assert not task.done()
    first.started()
    await soon()
    assert task.done()


async def test_who_waits_while_the_only_decode_worker_is_replaced_keeps_its_place() -> None:
    """Or all that had been accepted would be refused, for a stream that broke for a moment."""
    bench = Bench()
    running = bench.ticket(150)
    await running.wait()
    tasks = [asyncio.create_task(bench.ticket(tokens).wait()) for tokens in (140, 130)]
    await soon()
    bench.workers.lose_decode()
    running.end(0)  # its worker is gone
    await soon()
    assert [task.done() for task in tasks] == [False, False]
    bench.workers.lose_decode(False)
    await soon()
    assert [task.done() for task in tasks] == [True, False]
    bench.workers.lose_decode()
    await soon()
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.waiting == (0, 0)


async def test_without_a_new_decode_worker_no_request_waits_for_ever() -> None:
    bench = Bench(resume_wait_s=0.05)
    running = bench.ticket(150)
    await running.wait()
    waiting = bench.ticket(60)
    task = asyncio.create_task(waiting.wait())
    await soon()
    bench.workers.lose_decode()
    async with asyncio.timeout(60):
        await task  # and finds no worker
    assert bench.waiting == (0, 0)


async def test_a_request_may_start_before_all_its_sequences_have_workers() -> None:
    bench = Bench()
    ticket = bench.ticket(130)
    ticket.request = replace(ticket.request, num_sequences=2)
    await ticket.wait()
    ticket.submitted()
    ticket.started()
    ticket.submitted()
    assert ticket.state is TicketState.STARTED
    ticket.end(0)
    assert bench.idle


async def test_cancelled_and_late_requests_leave_nothing_behind() -> None:
    bench = Bench()
    running = bench.ticket(200)
    await running.wait()
    cancelled, let_go = bench.ticket(130), bench.ticket(140)
    tasks = [asyncio.create_task(ticket.wait()) for ticket in (cancelled, let_go)]
    await soon()
    tasks[0].cancel()
    await soon()
    assert bench.waiting == (1, 140)
    running.started()
    tasks[1].cancel()  # between being let go and noticing it
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in ended] == 2 * [asyncio.CancelledError]
    assert bench.waiting == (0, 0)
    assert bench.idle
    await running_out_of_time(bench)


async def running_out_of_time(bench: Bench) -> None:
    blocker = bench.ticket(102)
    await blocker.wait()
    late = bench.ticket(70, left_s=1.05)
    task = asyncio.create_task(late.wait())
    await soon()
    bench.now += 1.05
    again = bench.ticket(70, left_s=10)
    with pytest.raises(DeadlineExceeded):
        await task
    blocker.end(0)
    await again.wait()
    again.end(0)
    assert bench.waiting == (0, 0)


async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    bench = Bench(max_queued_requests=2, max_queued_tokens=1000)
    running = bench.ticket(500)
    await running.wait()
    tasks = [asyncio.create_task(bench.ticket(300).wait()) for _ in range(2)]
    await soon()
    with pytest.raises(Overloaded) as caught:
        await bench.ticket(260).wait()
    # 500 tokens are on their way and 600 wait, at 100 a second.
    assert caught.value.retry_after_s == pytest.approx(11.0)
    tasks[0].cancel()
    await soon()
    with pytest.raises(Overloaded, match="300 prompt tokens are waiting"):
        await bench.ticket(800).wait()
    assert bench.metrics.value(metrics.REFUSALS, reason="queue_full") == 2
    tasks[1].cancel()
    await soon()


async def test_a_caller_has_a_bound_of_waiting_tokens() -> None:
    bench = Bench()
    running = bench.ticket(500)
    await running.wait()
    small, other = Caller(name="small", max_queued_tokens=500), Caller(name="other")
    tasks = [asyncio.create_task(bench.ticket(450, small).wait())]
    await soon()
    with pytest.raises(Overloaded, match="'small' has 450 of 500"):
        await bench.ticket(300, small).wait()
    tasks.append(asyncio.create_task(bench.ticket(260, other).wait()))
    await soon()
    assert bench.waiting == (2, 710)
    for task in tasks:
        task.cancel()
    await soon()


async def test_what_cannot_be_had_in_time_is_refused_at_once() -> None:
    bench = Bench()
    running = bench.ticket(500)
    await running.wait()
    with pytest.raises(Late, match=r"in time: about 5\.0 s of work") as caught:
        await bench.ticket(260, left_s=3.0).wait()
    assert caught.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(Late):
        await bench.ticket(260, tier=ServiceTier(ttft_s=0.5)).wait()
    with pytest.raises(Late):  # for the time that its client gives it, not for what it is promised
        await bench.ticket(260, left_s=3.0, tier=ServiceTier(ttft_s=8.0)).wait()
    task = asyncio.create_task(bench.ticket(260, left_s=8.0).wait())
    await soon()
    assert not task.done()
    task.cancel()
    running.end(0)
    await bench.ticket(10, tier=ServiceTier(ttft_s=0.5)).wait()
    bench.queue.finished(10, 2.0)
    with pytest.raises(Late, match=r"a token takes 0\.200 s now"):
        await bench.ticket(10, tier=ServiceTier(tpot_s=0.1)).wait()
    bench.now += 11.0  # the measurement is old: try again
    await bench.ticket(10, tier=ServiceTier(tpot_s=0.1)).wait()
    assert bench.metrics.value(metrics.REFUSALS, reason="deadline") == 2
    assert bench.metrics.value(metrics.REFUSALS, reason="ttft") == 1
    assert bench.metrics.value(metrics.REFUSALS, reason="tpot") == 1


async def test_a_gap_below_a_decode_step_is_refused() -> None:
    """By the quickest decode worker; while one has measured nothing the request is tried."""
    bench = Bench()
    bench.workers.decodes = [
        Worker(Role.DECODE, WorkerLoad(decode_step_s=seconds), free_tokens=1600)
        for seconds in (0.03, 0.005)
    ]
    with pytest.raises(Late, match=r"a decode step takes 0\.0050 s now, .* promises 0\.004 s"):
        await bench.ticket(10, tier=ServiceTier(gap_s=0.004)).wait()
    assert bench.metrics.value(metrics.REFUSALS, reason="gap") == 1
    await bench.ticket(10, tier=ServiceTier(gap_s=0.006)).wait()
    bench.workers.decodes[0].load = WorkerLoad()
    await bench.ticket(10, tier=ServiceTier(gap_s=0.004)).wait()


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "gap_s", "weight"])
def test_what_a_tier_promises_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        ServiceTier(**{name: 0.0})


async def test_one_slow_request_among_many_causes_no_refusal() -> None:
    """What counts is how many tokens a second all had that ended lately."""
    bench = Bench()
    tier = ServiceTier(tpot_s=0.1)
    bench.queue.finished(1000, 20.0)
    bench.queue.finished(2, 3.0)
    await bench.ticket(10, tier=tier).wait()
    bench.now += 9.0
    bench.queue.finished(100, 15.0)
    await bench.ticket(10, tier=tier).wait()
    bench.now += 1.0  # of these, the first two are too old
    with pytest.raises(Late, match=r"a token takes 0\.150 s now") as caught:
        await bench.ticket(10, tier=tier).wait()
    assert caught.value.retry_after_s == 9.0
    assert len(bench.queue._pace._ended) == 1


async def test_a_light_caller_is_promised_its_own_wait_not_the_heavy_ones() -> None:
    bench = Bench()
    heavy, light = Caller(name="heavy"), Caller(name="light")
    running = bench.ticket(100, heavy)
    await running.wait()
    tickets = [bench.ticket(100, heavy) for _ in range(50)]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await soon()
    with pytest.raises(Late):
        await bench.ticket(100, heavy, left_s=20.0).wait()
    mine = asyncio.create_task(bench.ticket(100, light, left_s=20.0).wait())
    await soon()
    running.end(0)
    tickets[0].end(0)
    await soon()
    assert [task.done() for task in [*tasks[:3], mine]] == [True, True, False, True]
    for task in [*tasks, mine]:
        task.cancel()
    await asyncio.gather(*tasks, mine, return_exceptions=True)


def test_of_a_thousand_workers_a_sample_stands_for_all() -> None:
    load = LoadEstimate(
        backlogs=[lambda _size: 500],
        rate=100.0,
        free_tokens=[100, 300],
        num_prefills=1000,
        num_decodes=1000,
    )
    assert load.pool_rate == 100_000.0
    assert load.pool_free_tokens == 200_000
    assert load.wait_s(10, []) == 5.0


def test_a_low_rate_under_little_load_is_not_taken_for_the_limit() -> None:
    peak = Peak(half_life_s=60.0)
    assert peak.take(1000.0, 0.0) == 1000.0
    assert peak.take(10.0, 60.0) == pytest.approx(500.0)
    assert peak.take(2000.0, 61.0) == 2000.0
    unknown = LoadEstimate(backlogs=[], rate=0.0, free_tokens=[0], num_prefills=0, num_decodes=1)
    assert unknown.wait_s(1000, []) == 0.0


async def test_a_new_prefill_worker_after_a_quiet_hour_is_not_taken_to_be_slow() -> None:
    """It reports no rate until it had a full step; what is left of an old peak would be nothing,
    and every wait an eternity."""
    bench = Bench()
    await bench.ticket(10).wait()
    bench.now += 3600.0
    bench.workers.report(tokens_per_second=0.0)
    running = bench.ticket(90)
    await running.wait()
    task = asyncio.create_task(bench.ticket(100).wait())
    await soon()
    assert task.done()
    with pytest.raises(Late, match=r"about 2\.0 s of work"):
        await bench.ticket(100, left_s=1.0).wait()
    assert bench.metrics.value(metrics.REFUSALS, reason="deadline") == 1


async def test_a_pause_of_the_queue_is_not_taken_for_its_end() -> None:
    """Ten requests have left at 10 tokens a second, two every 20 s, when decode is full for 20 s: a
    rate that fades with every second would be 50 times lower, and the wait an hour."""
    bench = Bench()
    bench.workers.decode.capacity_tokens = 150
    running = bench.ticket(100)
    await running.wait()
    tickets = [bench.ticket(100) for _ in range(10)]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await soon()
    for ticket in tickets:
        bench.now += 10.0
        running.end(0)
        await soon()
        running = ticket
    bench.workers.decode.capacity_tokens = 0
    tasks += [asyncio.create_task(bench.ticket(100).wait()) for _ in range(10)]
    await soon()
    for _ in range(4):
        bench.now += 5.0
        with pytest.raises(Late):  # each look at the queue counts the time since the last
            await bench.ticket(100, left_s=1.0).wait()
    with pytest.raises(Late, match=r"about 199\.\d s of work"):
        await bench.ticket(100, left_s=100.0).wait()
    running.end(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_how_slowly_another_queue_drained_says_nothing() -> None:
    """Cached prompts left one a second, a token's work each, while decode was full. What prefill
    does in 4 s is not refused an hour later because at that pace it would take 300."""
    bench = Bench()
    bench.workers.decode.capacity_tokens = 150
    running = bench.ticket(100)
    await running.wait()
    tickets = [bench.ticket(100, cached=100) for _ in range(10)]
    tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await soon()
    for ticket in tickets:
        bench.now += 1.0
        running.end(0)
        await soon()
        running = ticket
    assert bench.waiting == (0, 0)
    running.end(0)
    bench.workers.decode.capacity_tokens = 1600
    bench.now += 3600.0
    running = bench.ticket(110)
    await running.wait()
    tasks += [asyncio.create_task(bench.ticket(100, left_s=60.0).wait()) for _ in range(4)]
    await soon()
    assert bench.waiting == (4, 400)
    assert bench.metrics.value(metrics.REFUSALS, reason="deadline") == 0
    running.end(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_which_tier_a_request_is_in() -> None:
    tiers = {"interactive": ServiceTier(ttft_s=1.0), "batch": ServiceTier(weight=0.1)}
    assert tier_name(None, ANYONE, tiers) == "default"
    assert tier_name("auto", Caller(name="b", service_tier="batch"), tiers) == "batch"
    assert tier_name("batch", ANYONE, tiers) == "batch"
    with pytest.raises(PermissionDenied):
        tier_name("interactive", Caller(name="b", service_tier="batch"), tiers)
    with pytest.raises(InvalidRequest, match="interactive, batch"):
        tier_name("flex", ANYONE, tiers)


# --- through the front ends -----------------------------------------------------------------------


async def test_both_front_ends_refuse_early_and_say_when_to_come_back(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    prefill = await fleet.add(Role.PREFILL, accepting=asyncio.Event())
    await fleet.add(Role.DECODE)
    tiers = {"interactive": ServiceTier(ttft_s=0.01)}
    settings = {"dispatch_window_s": 0.001, "max_queued_requests": 1, "service_tiers": tiers}
    async with make_front_ends(fleet, **settings) as front_ends:
        body = {"prompt": [5] * 100, "max_tokens": 3}
        running = [asyncio.create_task(front_ends.post("/v1/completions", body)) for _ in range(2)]
        await until(lambda: front_ends.router.metrics.value(metrics.QUEUED_REQUESTS) == 1)
        url = front_ends.url + "/v1/completions"
        for extra, status, code in (
            ({}, 429, "overloaded"),
            ({"service_tier": "interactive"}, 503, "unavailable"),
        ):
            async with front_ends.http.post(url, json=body | extra) as response:
                assert response.status == status
                assert int(response.headers["retry-after"]) >= 1
                assert (await response.json())["error"]["code"] == code
            request = pb.GenerateRequest(max_tokens=3, **extra)
            request.prompt_token_ids.ids.extend(body["prompt"])
            with pytest.raises(aio.AioRpcError) as caught:
                await front_ends.inference.Generate(request).read()
            grpc_code, trailers = status_of(caught.value)
            assert grpc_code is (
                grpc.StatusCode.RESOURCE_EXHAUSTED if status == 429 else grpc.StatusCode.UNAVAILABLE
            )
            assert float(trailers["retry-after"]) >= 1
        prefill.accepting.set()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
        for gauge in (metrics.QUEUED_REQUESTS, metrics.REQUESTS_WAITING, metrics.REQUESTS_RUNNING):
            assert front_ends.router.metrics.value(gauge) == 0


async def test_a_named_tier_is_answered(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(
        fleet, service_tiers={"batch": ServiceTier(weight=0.5)}
    ) as front_ends:
        body = {"prompt": "hello", "max_tokens": 2}
        for asked, given in ((None, None), ("auto", "default"), ("batch", "batch")):
            fields = body if asked is None else body | {"service_tier": asked}
            _, answer = await front_ends.post("/v1/completions", fields)
            assert answer.get("service_tier") == given
            async with front_ends.http.post(
                front_ends.url + "/v1/completions", json=fields | {"stream": True}
            ) as response:
                events = [line async for line in response.content if line.startswith(b"data: {")]
            assert {json.loads(event[6:]).get("service_tier") for event in events} == {given}
            first = await front_ends.inference.Generate(pb.GenerateRequest(**fields)).read()
            assert (first.service_tier if first.HasField("service_tier") else None) == given


async def test_how_slowly_a_client_reads_is_not_the_pace_of_the_workers(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(
        fleet, service_tiers={"steady": ServiceTier(tpot_s=20.0)}
    ) as front_ends:
        service = front_ends.router._service
        clock = service.clock
        service.clock = lambda: clock() + 100.0  # as late is the end of each request seen
        body = {"prompt": "hello", "max_tokens": 3, "service_tier": "steady"}
        for _ in range(2):
            assert (await front_ends.post("/v1/completions", body))[0] == 200


async def test_a_light_key_passes_a_heavy_one(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    prefill = await fleet.add(Role.PREFILL, accepting=asyncio.Event())
    await fleet.add(Role.DECODE)
    heavy, light = new_key(), new_key()
    entries = [{"name": n, "hash": hashed(k)} for n, k in (("heavy", heavy), ("light", light))]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}))
    settings = {"dispatch_window_s": 0.001, "api_keys_file": str(path)}
    async with make_front_ends(fleet, **settings) as front_ends:
        done: list[str] = []

        async def ask(front_ends: FrontEnds, name: str, key: str) -> None:
            body = {"prompt": [5] * 50, "max_tokens": 2}
            headers = {"Authorization": f"Bearer {key}"}
            async with front_ends.http.post(
                front_ends.url + "/v1/completions", json=body, headers=headers
            ) as response:
                assert response.status == 200
            done.append(name)

        def queued() -> float:
            return front_ends.router.metrics.value(metrics.QUEUED_REQUESTS)

        tasks = [asyncio.create_task(ask(front_ends, "heavy", heavy)) for _ in range(20)]
        await until(lambda: queued() == 19)  # one is on its way to prefill
        tasks.append(asyncio.create_task(ask(front_ends, "light", light)))
        await until(lambda: queued() == 20)
        prefill.accepting.set()
        await asyncio.gather(*tasks)
        assert done.index("light") < 8
