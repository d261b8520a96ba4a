"""Every request is counted once, under the outcome it had."""

from __future__ import annotations

import asyncio
import time

import grpc

from observability import metrics
from protocol.errors import ErrorCode
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.auth.keys import ANYONE
from router.request.generate_request import make_request_id
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet
from tests.support.typed_requests import completion


def failures(front_ends: FrontEnds, front_end: str) -> dict[str, float]:
    """Failed requests of a front end by code."""
    counts = {
        code.value: front_ends.router.metrics.value(
            metrics.REQUEST_FAILURES, door=front_end, code=code.value
        )
        for code in ErrorCode
    }
    return {code: count for code, count in counts.items() if count}


async def test_a_deadline_of_a_call_is_counted_as_one_and_a_cancel_as_one(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.05)
    request = pb.GenerateRequest(prompt="hello", max_tokens=400)
    async with make_front_ends(fleet) as front_ends:
        await front_ends.inference.ListModels(pb.ListModelsRequest())  # it takes time to connect
        late = [front_ends.inference.Generate(request, timeout=2) for _ in range(3)]
        await until(lambda: len(worker.submitted) == 3)
        # A client's clock may run out before the server's, which takes that for a cancel; here both
        # have by the time that the server looks.
        time.sleep(2.1)  # noqa: ASYNC251
        assert {await call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        call = front_ends.inference.Generate(request, timeout=30)
        await call.read()
        call.cancel()
        await until(lambda: sum(failures(front_ends, "grpc").values()) == 4)
        assert failures(front_ends, "grpc") == {"deadline_exceeded": 3, "cancelled": 1}


async def test_a_client_that_leaves_while_its_request_ends_is_not_counted_for_ever(
    front_ends: FrontEnds,
) -> None:
    service = front_ends.router._service
    request = completion(prompt="hello", max_tokens=3)

    async def ask() -> None:
        async with service.generate(
            request, request_id=make_request_id(None), arrival=service.clock(), caller=ANYONE
        ) as generation:
            async for _ in generation:
                pass
            asyncio.current_task().cancel()  # takes effect at the next wait, which is the end

    task = asyncio.create_task(ask())
    await asyncio.wait([task])
    assert task.cancelled()
    for gauge in (metrics.REQUESTS_RUNNING, metrics.REQUESTS_WAITING):
        assert (gauge.name, front_ends.router.metrics.value(gauge)) == (gauge.name, 0)
    assert front_ends.router.num_requests == 0
