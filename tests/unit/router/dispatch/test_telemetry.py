"""Trace context on both front ends, the spans of requests, and what they add to metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from observability.tracing import Tracing
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.dispatch.telemetry import _covered
from tests.support.router_front_ends import FrontEnds, open_front_ends
from tests.support.stub_workers import StubFleet

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "hello there", "max_tokens": 3}


def headers(sampled: bool = True) -> dict[str, str]:
    parent = f"00-{TRACE}-{SPAN}-0{int(sampled)}"
    return {"traceparent": parent, "tracestate": "vendor=1", "x-request-id": "mine"}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def traced(
    fleet: StubFleet, model_folder: Path, spans: InMemorySpanExporter
) -> AsyncIterator[FrontEnds]:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with open_front_ends(fleet, model_folder, tracing=Tracing(provider)) as front_ends:
        yield front_ends


async def finished(spans: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The request's span and its phases, once they have been made."""
    async with asyncio.timeout(60):
        while not (done := spans.get_finished_spans()) or done[-1].kind.name != "SERVER":
            await asyncio.sleep(0.005)
    *phases, root = done
    return root, phases


async def post(front_ends: FrontEnds, body: dict, sampled: bool = True) -> None:
    url = front_ends.url + "/v1/completions"
    async with front_ends.http.post(url, json=body, headers=headers(sampled)) as response:
        await response.read()


async def call(front_ends: FrontEnds, body: dict, sampled: bool = True) -> None:
    metadata = tuple(headers(sampled).items())
    async for _ in front_ends.inference.Generate(pb.GenerateRequest(**body), metadata=metadata):
        pass


@pytest.mark.parametrize("ask", [post, call])
async def test_spans_of_a_request(traced: FrontEnds, spans: InMemorySpanExporter, ask) -> None:
    began = time.monotonic()
    await ask(traced, BODY | {"timeline": True})
    took = time.monotonic() - began
    root, phases = await finished(spans)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == SPAN
    assert root.name == "completion tiny"
    assert root.attributes["baton.request_name"] == "mine"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert 0 < root.attributes["baton.time_to_first_token"] < took
    assert {s.name for s in phases} >= {"tokenize", "route", "prefill", "transfer", "decode"}
    for phase in phases:
        assert phase.parent.span_id == root.context.span_id
        assert phase.context.trace_id == root.context.trace_id
        assert root.start_time <= phase.start_time <= phase.end_time <= root.end_time
    moved = next(phase for phase in phases if phase.name == "transfer")
    assert moved.attributes["baton.bytes"] == 4096
    assert moved.attributes["baton.attempt"] == 0
    for worker in traced.fleet.workers:
        trace = worker.submitted[0].trace
        assert trace.trace_id == TRACE
        assert trace.span_id == f"{root.context.span_id:016x}"
        assert trace.state == "vendor=1"


async def test_a_failed_request_says_how_and_quotes_nothing(
    traced: FrontEnds, spans: InMemorySpanExporter
) -> None:
    await post(traced, {"prompt": "the secret", "max_tokens": 10**6})
    root, phases = await finished(spans)
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "context_length_exceeded"
    assert phases == []
    assert "secret" not in root.to_json()


async def test_a_client_that_does_not_sample_is_heeded(
    traced: FrontEnds, spans: InMemorySpanExporter
) -> None:
    await post(traced, BODY, sampled=False)
    assert spans.get_finished_spans() == ()
    trace = traced.fleet.workers[0].submitted[0].trace
    assert (trace.trace_id, trace.sampled) == (TRACE, False)


async def test_without_tracing_the_context_is_passed_on_as_it_came(front_ends: FrontEnds) -> None:
    await post(front_ends, BODY)
    await call(front_ends, BODY)
    for worker in front_ends.fleet.workers:
        for submit in worker.submitted:
            assert submit.trace.parent == headers()["traceparent"]
    await front_ends.post("/v1/completions", BODY)
    assert front_ends.fleet.workers[0].submitted[-1].trace is None


async def test_spans_reach_a_collector(fleet: StubFleet, model_folder: Path) -> None:
    await fleet.add(Role.DECODE)
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response()

    application = web.Application()
    application.router.add_post("/v1/traces", take)
    async with TestServer(application) as collector:
        endpoint = f"http://127.0.0.1:{collector.port}"
        async with open_front_ends(fleet, model_folder, otlp_endpoint=endpoint) as front_ends:
            await post(front_ends, BODY)
    sent = ExportTraceServiceRequest.FromString(bodies[0]).resource_spans[0]
    attributes = {a.key: a.value.string_value for a in sent.resource.attributes}
    assert attributes["service.name"] == "baton-router"
    assert "decode" in {span.name for span in sent.scope_spans[0].spans}


# --- metrics --------------------------------------------------------------------------------------

TIMES = st.integers(0, 50)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=8)


def test_overlapping_waits_count_once() -> None:
    assert _covered([]) == 0
    assert _covered([(1.0, 3.0), (2.0, 4.0)]) == 3.0
    assert _covered([(2.0, 2.5), (1.0, 4.0)]) == 3.0
    assert _covered([(1.0, 2.0), (5.0, 7.0)]) == 3.0


@given(SPANS)
def test_it_is_the_size_of_the_union(spans: list[tuple[int, int]]) -> None:
    union = {second for start, end in spans for second in range(start, end)}
    assert _covered(spans) == len(union)


async def test_each_request_is_a_line_of_the_access_log(
    fleet: StubFleet, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.add(Role.DECODE)
    async with open_front_ends(fleet, model_folder, access_log=True) as front_ends:
        async with front_ends.http.post(
            f"{front_ends.url}/v1/completions", json=BODY, headers={"x-request-id": "mine"}
        ) as response:
            assert response.status == 200
        too_many = pb.GenerateRequest(prompt="hello there", max_tokens=10**6)
        with pytest.raises(AioRpcError):
            async for _ in front_ends.inference.Generate(too_many):
                pass
    served, refused = (r for r in caplog.records if r.name == "baton.access")
    assert (served.code, served.request_name, served.kind) == ("ok", "mine", "completion")
    assert served.output_tokens == 3
    assert 0 < served.first_token_s <= served.seconds
    assert refused.code == "context_length_exceeded"
    assert not hasattr(refused, "output_tokens")


async def test_without_the_setting_no_request_is_logged(
    traced: FrontEnds, caplog: pytest.LogCaptureFixture
) -> None:
    await traced.post("/v1/completions", BODY)
    assert not [record for record in caplog.records if record.name == "baton.access"]
