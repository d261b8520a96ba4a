"""Requests through workers that fail: which ones get the next attempt, and the next request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from observability import metrics
from protocol.errors import BatonError, HandoffFailed, Unavailable
from protocol.ids import Role
from router.workers.bookkeeping import CircuitBreaker
from router.workers.policy import LocalReason
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet

PROMPT = [30, 31, 32, 33, 34, 35]  # longer than the threshold for local prefill


def expected(count: int) -> list[int]:
    return [20 + i for i in range(count)]


async def ids_of(front_ends: FrontEnds, count: int = 8) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": count, "return_token_ids": True}
    status, answer = await front_ends.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def metric(front_ends: FrontEnds, which: metrics.Metric, **labels: str) -> float:
    return front_ends.router.metrics.value(which, **labels)


async def test_one_failed_handoff_is_tried_again_on_the_only_prefill_worker(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    failed = HandoffFailed("the link broke")
    prefill = await fleet.add(Role.PREFILL, fail_after=0, fail_error=failed, fail_attempts=1)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        assert await ids_of(front_ends) == expected(8)
        assert [s.key.attempt for s in prefill.submitted] == [0, 1]
        local = (
            metric(front_ends, metrics.LOCAL_PREFILLS, reason=reason) for reason in LocalReason
        )
        assert sum(local) == 0


async def test_a_failed_handoff_is_tried_again_with_another_prefill_worker(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    failed = HandoffFailed("the link broke")
    bad = await fleet.add(Role.PREFILL, fail_after=0, fail_error=failed)
    good = await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        start = time.monotonic()
        for _ in range(30):
            assert await ids_of(front_ends) == expected(8)
        assert len(good.submitted) == 30
        # The breaker opens, and probes after 1 s, 2 s more, ...
        assert len(bad.submitted) <= 3 + int(time.monotonic() - start)
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="no_prefill_ready") == 0


async def test_prefill_that_keeps_failing_is_left_out(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    failed = HandoffFailed("the link broke")
    bad = await fleet.add(Role.PREFILL, fail_after=0, fail_error=failed)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        start = time.monotonic()
        for _ in range(20):
            assert await ids_of(front_ends) == expected(8)
        assert 2 <= len(bad.submitted) <= 5 + int(time.monotonic() - start)
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="prefill_failing") == 20


async def test_a_worker_that_fails_at_once_does_not_draw_the_traffic(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    prefill = await fleet.add(Role.PREFILL)
    bad = await fleet.add(Role.DECODE, fail_after=0)
    good = await fleet.add(Role.DECODE, delay_s=0.005)
    async with make_front_ends(fleet) as front_ends:
        start = time.monotonic()
        for _ in range(20):
            assert (
                await asyncio.gather(*(ids_of(front_ends) for _ in range(6))) == [expected(8)] * 6
            )
        assert len(good.submitted) == 120
        assert len(bad.submitted) <= 12 + int(time.monotonic() - start)
        assert len(prefill.submitted) <= 120 + len(bad.submitted)


async def test_a_mended_prefill_worker_is_back_with_its_first_handoff(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """Not when the first output ends, which may take minutes."""
    failed = HandoffFailed("the link broke")
    prefill = await fleet.add(Role.PREFILL, fail_after=0, fail_error=failed)
    decode = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        for _ in range(3):
            await ids_of(front_ends)
        prefill.fail_after = None
        (client,) = front_ends.router._workers.ready(Role.PREFILL)
        assert client.breaker.state == "open"
        await until(lambda: client.breaker.allows(front_ends.router._service.clock()))
        decode.gate = asyncio.Event()  # outputs stand still after decode's first token
        running = asyncio.create_task(ids_of(front_ends))
        await until(lambda: client.breaker.state == "closed")
        assert not running.done()
        decode.gate.set()
        await running


async def test_a_prefill_worker_that_has_handed_over_may_go_before_decode_has_begun(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """It says so, and drains; decode's first token comes a step later."""
    prefill = await fleet.add(Role.PREFILL)
    decode = await fleet.add(Role.DECODE, delay_s=0.2)
    async with make_front_ends(fleet) as front_ends:
        running = asyncio.create_task(ids_of(front_ends))
        await until(lambda: metric(front_ends, metrics.TIME_TO_FIRST_TOKEN) > 0)
        await asyncio.sleep(0.05)
        await prefill.stop()
        assert await running == expected(8)
        assert len(decode.submitted) == 1
        assert metric(front_ends, metrics.RESUMES, cause="prefill_lost") == 0


async def test_a_lost_prefill_worker_is_no_failure_of_decode(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """Decode did nothing wrong, however many hand-offs it waited for."""
    prefill = await fleet.add(Role.PREFILL, prefill_delay_s=60.0)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        requests = [asyncio.create_task(ids_of(front_ends)) for _ in range(8)]
        await until(lambda: len(prefill.submitted) == 8)
        (decode,) = front_ends.router._workers.ready(Role.DECODE)
        await prefill.stop()
        assert await asyncio.gather(*requests) == [expected(8)] * 8
        assert decode.breaker.state == "closed"
        assert decode.breaker._failures == 0


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (Unavailable("no memory"), [(Role.PREFILL, 0)]),
        (HandoffFailed("the link broke"), [(Role.DECODE, 0), (Role.PREFILL, 0)]),
    ],
)
async def test_only_a_failed_handoff_counts_for_both_workers(
    fleet: StubFleet,
    make_front_ends: MakeFrontEnds,
    monkeypatch: pytest.MonkeyPatch,
    error: BatonError,
    counted: list[tuple[Role, int]],
) -> None:
    await fleet.add(Role.PREFILL, fail_after=0, fail_error=error, fail_attempts=1)
    await fleet.add(Role.DECODE)
    failed, note = [], CircuitBreaker.failed
    monkeypatch.setattr(
        CircuitBreaker,
        "failed",
        lambda self, key, now: [failed.append((self, key.attempt)), note(self, key, now)],
    )
    async with make_front_ends(fleet) as front_ends:
        assert await ids_of(front_ends) == expected(8)
        clients = front_ends.router._workers
        breakers = {clients.ready(role)[0].breaker: role for role in Role}
        assert [(breakers[breaker], attempt) for breaker, attempt in failed] == counted


async def test_a_mended_decode_worker_is_back_with_its_first_token(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.PREFILL)
    decode = await fleet.add(Role.DECODE, fail_after=1)
    async with make_front_ends(fleet) as front_ends:
        (client,) = front_ends.router._workers.ready(Role.DECODE)
        failing = [asyncio.create_task(ids_of(front_ends)) for _ in range(3)]
        await until(lambda: client.breaker.state == "open")
        decode.fail_after = None
        await asyncio.gather(*failing, return_exceptions=True)
        await until(lambda: client.breaker.allows(front_ends.router._service.clock()))
        decode.gate = asyncio.Event()
        running = asyncio.create_task(ids_of(front_ends))
        await until(lambda: client.breaker.state == "closed")
        assert not running.done()
        decode.gate.set()
        await running


async def test_an_output_that_began_before_its_submit_was_answered_is_not_lost(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """The answer does not come in time, though the tokens do, and there is no other worker."""
    decode = await fleet.add(Role.DECODE, delay_s=0.02, answers_late=True)
    async with make_front_ends(fleet, submit_timeout_s=0.2) as front_ends:
        asked = asyncio.create_task(ids_of(front_ends, 30))
        await until(lambda: decode.submitted)
        decode.answers_late = False
        assert await asked == expected(30)
        first, again = decode.submitted
        assert len(again.output_ids) > 0
        assert decode.cancelled == [first.key]
        assert front_ends.router.num_requests == 0


async def test_what_a_lost_worker_has_not_answered_counts_as_no_choice(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    lost = await fleet.add(Role.DECODE, accepting=asyncio.Event())
    async with make_front_ends(fleet) as front_ends:
        asked = asyncio.create_task(ids_of(front_ends))
        await until(lambda: lost.num_submits)
        await fleet.add(Role.DECODE)
        front_ends.router.set_workers(fleet.refs)
        lost.break_streams()
        assert await asked == expected(8)
        assert not lost.submitted
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="no_prefill_ready") == 1


async def test_no_worker_seems_to_stand_still_because_its_router_did(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, silence_s=1.0) as front_ends:
        workers = front_ends.router._workers
        candidates = workers.candidates

        def after_a_stall(*prompt: Any) -> Any:
            time.sleep(0.7)  # reports wait in the sockets
            return candidates(*prompt)

        monkeypatch.setattr(workers, "candidates", after_a_stall)
        assert await ids_of(front_ends) == expected(8)
        assert metric(front_ends, metrics.LOCAL_PREFILLS, reason="prefill_failing") == 0
