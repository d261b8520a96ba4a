"""The gRPC front end: streams, presence, health, reflection, deadlines; the same tokens as HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from observability import metrics
from protocol.errors import Internal, InvalidRequest
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.grpc.requests import generate_request
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, status_of, until
from tests.support.stub_workers import StubFleet
from tests.support.wire_requests import to_message

HELLO = [{"role": "user", "content": "hello"}]


async def run(front_ends: FrontEnds, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [message async for message in front_ends.inference.Generate(request, timeout=60)]


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(c.text for m in messages for c in m.choices if c.index == index)


async def test_a_stream(front_ends: FrontEnds) -> None:
    messages = await run(front_ends, pb.GenerateRequest(prompt="hello", max_tokens=4))
    assert messages[0].id
    assert messages[0].model == "tiny"
    assert [m.choices[0].text for m in messages[:-1]] == list("2345")
    assert [list(m.choices[0].token_ids) for m in messages[:-1]] == [[20], [21], [22], [23]]
    assert messages[-2].choices[0].finish_reason == "length"
    assert not messages[0].choices[0].HasField("finish_reason")
    assert messages[-1].usage.completion_tokens == 4
    assert all(not m.HasField("usage") for m in messages[:-1])


async def test_chat_with_parts(front_ends: FrontEnds) -> None:
    parts = [pb.ContentPart(type="text", text="hello")]
    message = pb.Message(role="user", parts=parts)
    in_parts = pb.GenerateRequest(chat=pb.Chat(messages=[message]), max_tokens=2)
    plain = to_message({"messages": HELLO, "max_tokens": 2})
    (a, b) = [(await run(front_ends, r))[-1].usage.prompt_tokens for r in (in_parts, plain)]
    assert a == b


def test_values_of_all_messages_have_one_bound() -> None:
    part = pb.ContentPart(type="text", text="a")
    messages = [pb.Message(role="user", parts=[part] * 3)] * 6000
    with pytest.raises(InvalidRequest, match="too many values") as caught:
        generate_request(pb.GenerateRequest(chat=pb.Chat(messages=messages)))
    assert caught.value.param == "messages[3461].parts"  # 6000 messages and 3461 times 3 parts


async def test_not_streamed(front_ends: FrontEnds) -> None:
    request = pb.GenerateRequest(prompt="hello", max_tokens=4, n=3, stream=False)
    (message,) = await run(front_ends, request)
    assert [choice.index for choice in message.choices] == [0, 1, 2]
    assert {choice.text for choice in message.choices} == {"2345"}
    assert {choice.finish_reason for choice in message.choices} == {"length"}
    assert all(len(choice.token_ids) == 4 for choice in message.choices)
    assert message.usage.completion_tokens == 12


async def test_prompt_ids_on_request(front_ends: FrontEnds) -> None:
    request = pb.GenerateRequest(max_tokens=2, return_token_ids=True)
    request.prompt_token_ids.ids.extend([30, 31])
    messages = await run(front_ends, request)
    assert list(messages[0].choices[0].prompt_token_ids) == [30, 31]
    request.return_token_ids = False
    messages = await run(front_ends, request)
    assert not any(c.token_ids or c.prompt_token_ids for m in messages for c in m.choices)


#: Requests whose tokens, text, finish and sampling must be the same through both front ends.
SAME: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"prompt": "hello", "temperature": 0.0, "seed": 0, "top_k": 0},
    {"prompt": "hello", "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 123, "top_k": -1},
    {"prompt": [30, 31, 32, 33, 34, 35], "max_tokens": 20},
    {"prompt": ["hello", "world"], "n": 2, "max_tokens": 3},
    {"messages": HELLO},
    {"messages": HELLO, "max_completion_tokens": 9, "min_tokens": 3},
    {"prompt": "hello", "max_tokens": 30, "stop": ["78", "zz"]},
    {"prompt": "hello", "max_tokens": 30, "stop_token_ids": [25]},
    {"prompt": "hello", "max_tokens": 30, "stop_token_ids": [25], "min_tokens": 10},
    {"prompt": "hello", "max_tokens": 30, "ignore_eos": True},
    {"prompt": "hello", "presence_penalty": 0.0, "logprobs": False, "repetition_penalty": 1.0},
    {"prompt": "hello", "presence_penalty": 1.5, "frequency_penalty": -2.0, "max_tokens": 3},
    {"prompt": "hello", "repetition_penalty": 1.2, "logit_bias": {"511": -100.0, "0": 7.5}},
]


@pytest.mark.parametrize("fields", SAME, ids=lambda fields: repr(fields)[:60])
async def test_both_front_ends_give_the_same(front_ends: FrontEnds, fields: dict[str, Any]) -> None:
    decode = front_ends.fleet.workers[1]
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    status, body = await front_ends.post(path, fields | {"return_token_ids": True})
    assert status == 200, body
    (message,) = await run(front_ends, to_message(fields))
    found = [(c.index, c.finish_reason, list(c.token_ids)) for c in message.choices]
    assert found == [(c["index"], c["finish_reason"], c["token_ids"]) for c in body["choices"]]
    texts = [c.get("text", c.get("message", {}).get("content")) for c in body["choices"]]
    assert [c.text for c in message.choices] == texts
    assert message.usage.total_tokens == body["usage"]["total_tokens"]
    half = len(decode.submitted) // 2
    first = sorted(decode.submitted[:half], key=lambda s: s.key.request_id[32:])
    second = sorted(decode.submitted[half:], key=lambda s: s.key.request_id[32:])
    for a, b in zip(first, second, strict=True):
        assert a.prompt_ids == b.prompt_ids
        if "seed" in fields:
            assert a.sampling == b.sampling
        else:
            assert a.sampling.max_tokens == b.sampling.max_tokens


async def test_zero_is_not_unset(front_ends: FrontEnds) -> None:
    decode = front_ends.fleet.workers[1]
    await run(front_ends, pb.GenerateRequest(prompt="a b c d e f"))
    await run(front_ends, pb.GenerateRequest(prompt="a b c d e f", temperature=0.0))
    await run(front_ends, pb.GenerateRequest(prompt="a b c d e f", seed=0))
    unset, zero, seeded = (submit.sampling for submit in decode.submitted)
    assert (unset.temperature, zero.temperature) == (1.0, 0.0)
    assert seeded.seed == 0
    assert unset.max_tokens == 16


async def test_the_timeline_as_field_and_trailer(front_ends: FrontEnds) -> None:
    request = to_message({"prompt": [30] * 20, "max_tokens": 3, "timeline": True})
    call = front_ends.inference.Generate(request, timeout=60)
    messages = [message async for message in call]
    phases = {span.phase for span in messages[-1].timeline.spans}
    assert phases == {"tokenize", "route", "prefill", "transfer", "decode"}
    trailer = json.loads(dict(await call.trailing_metadata())["baton-timeline"])
    assert trailer["request_id"] == messages[0].id == messages[-1].timeline.request_id


async def test_a_failure_in_mid_stream_is_a_status(front_ends: FrontEnds) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 4, False
    decode.fail_error = Internal("the engine broke")
    got = []
    with pytest.raises(aio.AioRpcError) as caught:
        async for message in front_ends.inference.Generate(to_message({"prompt": [30] * 6})):
            got.append(message)
    assert got == []  # not streamed: nothing, rather than half
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    request = to_message({"prompt": [30] * 6, "stream": True})
    with pytest.raises(aio.AioRpcError) as caught:
        async for message in front_ends.inference.Generate(request):
            got.append(message)
    assert text_of(got) == "2345"
    assert caught.value.details() == "the engine broke"


async def test_a_cancelled_call_ends_the_work(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    async with make_front_ends(fleet) as front_ends:
        call = front_ends.inference.Generate(pb.GenerateRequest(prompt="hello", max_tokens=400))
        await call.read()
        call.cancel()
        await until(lambda: not worker.running)
        await until(lambda: front_ends.router.num_requests == 0)
        value = front_ends.router.metrics.value
        assert value(metrics.REQUEST_FAILURES, door="grpc", code="cancelled") == 1


async def test_the_calls_deadline_reaches_the_workers(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    async with make_front_ends(fleet) as front_ends:
        request = pb.GenerateRequest(prompt="hello", max_tokens=400)
        while not worker.submitted:  # a busy machine may take longer until then
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in front_ends.inference.Generate(request, timeout=1.0):
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not worker.running)
        (submit,) = worker.submitted
        assert submit.time_left_s < 1.02  # gRPC sends hundredths, rounded up
        request.timeout = 0.2
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in front_ends.inference.Generate(request):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_overload_says_when_to_come_back(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE, delay_s=0.05)
    async with make_front_ends(fleet, max_requests=1, retry_after_s=2.5) as front_ends:
        running = asyncio.create_task(run(front_ends, pb.GenerateRequest(prompt="hello")))
        await until(lambda: front_ends.router.num_requests == 1)
        with pytest.raises(aio.AioRpcError) as caught:
            await run(front_ends, pb.GenerateRequest(prompt="hello"))
        code, trailers = status_of(caught.value)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailers["retry-after"] == "2.5"
        retry = error_details_pb2.RetryInfo()
        details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
        assert details[0].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
        await running


async def test_models_and_tokens(front_ends: FrontEnds) -> None:
    models = (await front_ends.inference.ListModels(pb.ListModelsRequest())).models
    assert [(m.id, m.owned_by, m.max_model_len) for m in models] == [("tiny", "baton", 512)]
    tokens = await front_ends.inference.Tokenize(pb.TokenizeRequest(prompt="hello 🙂"))
    assert tokens.count == len(tokens.tokens)
    back = await front_ends.inference.Detokenize(pb.DetokenizeRequest(tokens=tokens.tokens))
    assert back.prompt == "hello 🙂"
    _, over_http = await front_ends.post("/tokenize", {"messages": HELLO})
    chat = pb.Chat(messages=[pb.Message(role="user", content="hello")])
    over_grpc = await front_ends.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(over_grpc.tokens) == over_http["tokens"]
    with pytest.raises(aio.AioRpcError) as caught:
        await front_ends.inference.Tokenize(pb.TokenizeRequest(prompt="x", model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(aio.AioRpcError) as caught:
        await front_ends.inference.Detokenize(pb.DetokenizeRequest(tokens=[-1]))
    assert status_of(caught.value)[1]["baton-error-param"] == "tokens"


async def test_health_follows_readiness(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    async with make_front_ends(fleet) as front_ends:
        stub = health_pb2_grpc.HealthStub(front_ends.channel)

        async def check(service: str = "") -> str:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

        assert await check() == "NOT_SERVING"
        await fleet.add(Role.DECODE)
        front_ends.router.set_workers(fleet.refs)
        await front_ends.wait_ready()
        while await check() != "SERVING":
            await asyncio.sleep(0.01)
        for service in ("", "baton.v1.Inference", "baton.v1.Admin"):
            assert await check(service) == "SERVING"
        with pytest.raises(aio.AioRpcError) as caught:
            await check("no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        front_ends.router.set_workers([])
        while await check() != "NOT_SERVING":
            await asyncio.sleep(0.01)
        assert await check("baton.v1.Inference") == "NOT_SERVING"


async def test_who_watches_health_does_not_keep_a_leaving_router(front_ends: FrontEnds) -> None:
    watch = health_pb2_grpc.HealthStub(front_ends.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    async with asyncio.timeout(60):
        assert await front_ends.router.retire(600.0)
        assert await watch.read() is aio.EOF
    assert await watch.code() is grpc.StatusCode.OK


async def test_reflection_lists_everything(front_ends: FrontEnds) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(front_ends.channel)

    async def ask(**request: str) -> Any:
        messages = iter([reflection_pb2.ServerReflectionRequest(**request)])
        async for reply in stub.ServerReflectionInfo(messages):
            return reply

    listed = (await ask(list_services="")).list_services_response.service
    assert {service.name for service in listed} == {
        "baton.v1.Inference",
        "baton.v1.Admin",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    reply = await ask(file_containing_symbol="baton.v1.Inference")
    file = FileDescriptorProto.FromString(reply.file_descriptor_response.file_descriptor_proto[0])
    assert file.package == "baton.v1"
    methods = {m.name for s in file.service for m in s.method}
    assert {"Generate", "ListModels", "Tokenize", "Detokenize", "Scale"} <= methods


async def test_text_with_hard_characters(front_ends: FrontEnds) -> None:
    front_ends.say(letters("a👩‍👩‍👧 b"))
    count = len(letters("a👩‍👩‍👧 b"))
    messages = await run(front_ends, pb.GenerateRequest(prompt="hello", max_tokens=count))
    assert text_of(messages) == "a👩‍👩‍👧 b"
    assert all("\ufffd" not in c.text for m in messages for c in m.choices)
