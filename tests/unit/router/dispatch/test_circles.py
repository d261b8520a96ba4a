"""However an output ends, reference counts free what the router had of it. Prompts in circles would
wait for the garbage collector, which stops every stream for tens of milliseconds to find them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from tests.support.circles import circles
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet, StubWorker
from tests.unit.router.dispatch.test_recalls import LONG_S, late
from tests.unit.router.dispatch.test_sequence_run import PROMPT, complete, expected, idle, ids_of

COUNT = 40


@pytest.fixture
async def front_ends(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> AsyncIterator[FrontEnds]:
    """With one worker of each role."""
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE, delay_s=0.005, prompt_rate=1e6)
    async with make_front_ends(fleet, local_gain_s=0.1, silence_s=60.0) as front_ends:
        yield front_ends


async def answered(front_ends: FrontEnds) -> None:
    assert await ids_of(front_ends) == expected(8)


async def streamed(front_ends: FrontEnds) -> None:
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=COUNT)
    async for _ in front_ends.inference.Generate(request, timeout=30):
        pass


async def left(front_ends: FrontEnds) -> None:
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=400)
    call = front_ends.inference.Generate(request, timeout=30)
    await call.read()
    call.cancel()


async def refused(front_ends: FrontEnds) -> None:
    status, _ = await complete(front_ends, max_tokens=-1)
    assert status == 400


async def passed_on(front_ends: FrontEnds, leave: Callable[[StubWorker], object]) -> None:
    """A decode worker joins the one that has begun, which then leaves."""
    _, decode = front_ends.fleet.workers
    answer = asyncio.create_task(ids_of(front_ends, max_tokens=COUNT))
    await until(lambda: any(index >= 3 for index in decode.next_index.values()))
    await front_ends.fleet.add(Role.DECODE)
    front_ends.router.set_workers(front_ends.fleet.refs)
    await front_ends.wait_ready(2, 1)
    leave(decode)
    assert await answer == expected(COUNT)


async def lost(front_ends: FrontEnds) -> None:
    await passed_on(front_ends, StubWorker.break_streams)


async def moved(front_ends: FrontEnds) -> None:
    await passed_on(front_ends, lambda decode: decode.change(Role.PREFILL))


async def given_back(front_ends: FrontEnds) -> None:
    prefill, _ = front_ends.fleet.workers
    prefill.prefill_delay_s = LONG_S
    answer = asyncio.create_task(ids_of(front_ends))
    await until(lambda: prefill.submitted)
    prefill.report(late(prefill, prefill.submitted[0]))
    assert await answer == expected(8)


@pytest.mark.parametrize("ask", [answered, streamed, left, refused, lost, moved, given_back])
async def test_the_router_leaves_no_circles_to_the_garbage_collector(
    front_ends: FrontEnds, ask: Callable[[FrontEnds], Coroutine[Any, Any, None]]
) -> None:
    with circles() as names:
        await ask(front_ends)
        await until(lambda: idle(front_ends))
    assert {name for name in names if name.startswith("router.")} == set()
