"""Prompts that a worker gives back before it begins with them: they are computed elsewhere, once,
and whatever the worker answers nothing is lost or stays counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from observability import metrics
from protocol.errors import Overloaded
from protocol.ids import Role
from protocol.loads import QueuedPrompt
from protocol.messages import Submit
from router.workers.prompt_queues import LOOK_S, MAX_GIVEN_BACK
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet, StubWorker
from tests.unit.router.dispatch.test_sequence_run import expected, idle, ids_of, metric

LONG_S = 600.0


@pytest.fixture
async def prefill(fleet: StubFleet) -> StubWorker:
    """It begins with nothing."""
    return await fleet.add(Role.PREFILL, prefill_delay_s=LONG_S)


@pytest.fixture
async def decode(fleet: StubFleet) -> StubWorker:
    return await fleet.add(Role.DECODE, prompt_rate=1e6)


@pytest.fixture
async def front_ends(
    prefill: StubWorker, decode: StubWorker, fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> AsyncIterator[FrontEnds]:
    async with make_front_ends(fleet, local_gain_s=0.1, silence_s=60.0) as front_ends:
        yield front_ends


def late(worker: StubWorker, submit: Submit, *, begun: bool = False) -> QueuedPrompt:
    """The clock of the stubs is all that decides what is late: the reports say it is."""
    now = worker.fleet.now()
    return QueuedPrompt(
        key=submit.key,
        left_tokens=len(submit.prompt_ids),
        due_at=now + LONG_S,
        ends_at=now + 2 * LONG_S,
        begun=begun,
    )


async def waits(front_ends: FrontEnds, worker: StubWorker) -> asyncio.Task[list[int]]:
    """An answer whose prompt waits on a worker."""
    num_before = len(worker.submitted)
    answer = asyncio.create_task(ids_of(front_ends))
    await until(lambda: len(worker.submitted) > num_before)
    return answer


def given_back(front_ends: FrontEnds, role: Role) -> float:
    return metric(front_ends, metrics.PROMPTS_GIVEN_BACK, role=role)


async def test_decode_computes_what_prefill_gives_back(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker
) -> None:
    answer = await waits(front_ends, prefill)
    prefill.report(late(prefill, prefill.submitted[0]))
    assert await answer == expected(8)
    first, again = decode.submitted
    assert prefill.asked_back == [first.key]
    assert (first.peer, again.peer) == (prefill.ref, None)
    assert (first.waited_s, again.key.attempt) == (0.0, 1)
    assert 0.0 < again.waited_s < LONG_S
    assert first.key in decode.cancelled
    assert given_back(front_ends, Role.PREFILL) == 1
    assert metric(front_ends, metrics.RESUMES, cause="prefill_failed") == 0
    (known,) = front_ends.router._workers.ready(Role.PREFILL)
    assert known.breaker._failures == 0
    await until(lambda: idle(front_ends))
    assert not front_ends.router._service._dispatcher.recalls._placed


async def test_prefill_computes_what_decode_gives_back(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker
) -> None:
    prefill.prefill_delay_s = 0.0
    decode.delay_s = LONG_S
    (known,) = front_ends.router._workers.ready(Role.PREFILL)
    known.load = known.load.__class__(tokens_per_second=1e-3)  # until it reports again
    answer = await waits(front_ends, decode)
    (first,) = decode.submitted
    assert first.peer is None
    decode.delay_s = 0.0
    await until(lambda: known.load.tokens_per_second == 1000.0)
    decode.report(late(decode, first))
    assert await answer == expected(8)
    (submit,) = prefill.submitted
    assert submit.key.attempt == 1
    assert submit.peer == decode.ref
    assert given_back(front_ends, Role.DECODE) == 1
    await until(lambda: idle(front_ends))


async def test_what_has_begun_goes_on(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker
) -> None:
    """Whether the router knows that or not; and it is asked once."""
    prefill.gives_back = False
    prefill.prefill_delay_s = 0.3
    answer = await waits(front_ends, prefill)
    (submit,) = prefill.submitted
    prefill.report(late(prefill, submit, begun=True))
    prefill.report(late(prefill, submit))
    await until(lambda: prefill.asked_back)
    prefill.report(late(prefill, submit))
    assert await answer == expected(8)
    assert prefill.asked_back == [submit.key]
    assert len(decode.submitted) == 1
    assert given_back(front_ends, Role.PREFILL) == 0
    await until(lambda: idle(front_ends))


@pytest.mark.parametrize("how", ["refuses", "leaves"])
async def test_without_the_worker_that_was_meant_another_is_chosen(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker, how: str
) -> None:
    third = await front_ends.fleet.add(Role.DECODE)
    front_ends.router.set_workers(front_ends.fleet.refs)
    await front_ends.wait_ready(2, 1)
    answer = await waits(front_ends, prefill)
    submit = prefill.submitted[0]
    prefill.prefill_delay_s = 0.0
    if how == "refuses":
        decode.refuse = Overloaded("full")
    prefill.gives_back = how == "refuses"
    prefill.report(late(prefill, submit))  # the rate of the third is not known
    await until(lambda: prefill.asked_back)
    if how == "leaves":
        await decode.stop()
        prefill.give_back([submit.key])
    assert await answer == expected(8)
    assert third.submitted
    await until(lambda: idle(front_ends))


async def test_a_prompt_does_not_go_back_and_forth(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker
) -> None:
    decode.delay_s = LONG_S
    answer = await waits(front_ends, prefill)
    for number in range(MAX_GIVEN_BACK):
        here = decode if number % 2 else prefill
        here.report(late(here, here.submitted[-1]))
        await until(lambda seen=number: len(decode.submitted) == seen + 2)
        here.report()
    last = prefill if MAX_GIVEN_BACK % 2 == 0 else decode
    await until(lambda: last.submitted[-1].key.attempt == MAX_GIVEN_BACK)
    num_asked = len(prefill.asked_back) + len(decode.asked_back)
    last.report(late(last, last.submitted[-1]))
    (known,) = front_ends.router._workers.ready(last.role)
    await until(lambda: known.load.prompts)
    await asyncio.sleep(5 * LOOK_S)
    assert len(prefill.asked_back) + len(decode.asked_back) == num_asked == MAX_GIVEN_BACK
    answer.cancel()
    await until(lambda: idle(front_ends))


async def test_a_client_that_leaves_while_its_prompt_is_asked_for(
    front_ends: FrontEnds, prefill: StubWorker, decode: StubWorker
) -> None:
    answer = await waits(front_ends, prefill)
    prefill.report(late(prefill, prefill.submitted[0]))
    await until(lambda: prefill.asked_back)
    answer.cancel()
    await until(lambda: idle(front_ends))
    assert not front_ends.router._service._dispatcher.recalls._placed
    assert not prefill.running
    await until(lambda: not decode.running)
