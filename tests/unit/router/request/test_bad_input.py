"""Bad input on both front ends: a typed error naming the field, and the server unharmed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from protocol.errors import STATUSES, ErrorCode
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.text.tokenizer import ModelText
from tests.support.router_front_ends import (
    FrontEnds,
    MakeFrontEnds,
    open_front_ends,
    status_of,
    until,
)
from tests.support.stub_workers import StubFleet
from tests.support.wire_requests import to_message

BAD = ErrorCode.INVALID_REQUEST
LONG = ErrorCode.CONTEXT_TOO_LONG
NOT_SERVED = ErrorCode.UNSUPPORTED
GONE = ErrorCode.NOT_FOUND

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now"}}

HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
SCHEMA = "response_format.json_schema.schema"


def _schema(described: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": described}
    return {"prompt": "hi", "response_format": form}


#: Fields of a body, the code, the field at fault. The tiny model has 512 ids and a context of 512.
CASES: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"prompt": ""}, BAD, "prompt"),
    ({"prompt": [""]}, BAD, "prompt"),
    ({"prompt": []}, BAD, "prompt"),
    ({"prompt": [[]]}, BAD, "prompt"),
    ({"prompt": ["ok", ""]}, BAD, "prompt"),
    ({"prompt": [-1]}, BAD, "prompt"),
    ({"prompt": [512]}, BAD, "prompt"),
    ({"prompt": [4294967295]}, BAD, "prompt"),
    ({"prompt": [[1, 2], [3, 512]]}, BAD, "prompt"),
    ({}, BAD, "prompt"),
    ({"prompt": [5] * 512}, LONG, "prompt"),
    ({"prompt": [5] * 5000}, LONG, "prompt"),
    ({"prompt": "word " * 50_000}, LONG, "prompt"),
    ({"prompt": [5] * 500, "max_tokens": 13}, LONG, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 2**40}, LONG, "max_tokens"),
    ({"prompt": "hi", "max_tokens": 0}, BAD, "max_tokens"),
    ({"prompt": "hi", "max_tokens": -1}, BAD, "max_tokens"),
    ({"prompt": "hi", "max_completion_tokens": 5}, BAD, "max_completion_tokens"),
    ({"prompt": "hi", "min_tokens": -1}, BAD, "min_tokens"),
    ({"prompt": "hi", "min_tokens": 9, "max_tokens": 8}, BAD, "min_tokens"),
    ({"prompt": "hi", "min_tokens": 10_000}, BAD, "min_tokens"),
    ({"prompt": "hi", "temperature": -0.5}, BAD, "temperature"),
    ({"prompt": "hi", "temperature": 1e30}, BAD, "temperature"),
    ({"prompt": "hi", "top_p": 0.0}, BAD, "top_p"),
    ({"prompt": "hi", "top_p": -1.0}, BAD, "top_p"),
    ({"prompt": "hi", "top_p": 1.5}, BAD, "top_p"),
    ({"prompt": "hi", "top_k": -7}, BAD, "top_k"),
    ({"prompt": "hi", "min_p": 2.0}, BAD, "min_p"),
    ({"prompt": "hi", "seed": -(2**63)}, BAD, "seed"),
    ({"prompt": "hi", "n": 0}, BAD, "n"),
    ({"prompt": "hi", "n": 1000}, BAD, "n"),
    ({"prompt": "hi", "stop": ""}, BAD, "stop"),
    ({"prompt": "hi", "stop": ["x"] * 40}, BAD, "stop"),
    ({"prompt": "hi", "guided_json": "[]"}, BAD, "guided_json"),
    ({"prompt": "hi", "stop_token_ids": [-1]}, BAD, "stop_token_ids"),
    ({"prompt": "hi", "stop_token_ids": [512]}, BAD, "stop_token_ids"),
    ({"prompt": "hi", "timeout": 0.0}, BAD, "timeout"),
    ({"prompt": "hi", "timeout": 1e9}, BAD, "timeout"),
    ({"prompt": "hi", "stream_options": {"include_usage": True}}, BAD, "stream_options"),
    ({"prompt": "hi", "model": "no-such"}, GONE, "model"),
    ({"prompt": "hi", "model": ""}, GONE, "model"),
    ({"messages": HI, "model": "no-such"}, GONE, "model"),
    ({"messages": []}, BAD, "messages"),
    ({"messages": [{"content": "x"}]}, BAD, "messages[0].role"),
    ({"messages": [*HI, {"role": "foo", "content": "x"}]}, BAD, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, BAD, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, BAD, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "x"}]}, NOT_SERVED, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        NOT_SERVED,
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "long " * 500}]}, LONG, "messages"),
    ({"messages": HI, "max_completion_tokens": 511}, LONG, "max_completion_tokens"),
    ({"prompt": "hi", "logprobs": True, "top_logprobs": 21}, BAD, "top_logprobs"),
    ({"messages": HI, "top_logprobs": 3}, BAD, "top_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": 21}, BAD, "prompt_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": -1}, BAD, "prompt_logprobs"),
    ({"prompt": "hi", "prompt_logprobs": 0, "max_tokens": -1}, BAD, "max_tokens"),
    ({"prompt": "hi", "echo": True, "max_tokens": 0, "min_tokens": 1}, BAD, "min_tokens"),
    ({"prompt": "hi", "max_tokens": 0}, BAD, "max_tokens"),
    ({"messages": HI, "echo": True}, BAD, "echo"),
    ({"prompt": "hi", "presence_penalty": 2.5}, BAD, "presence_penalty"),
    ({"prompt": "hi", "frequency_penalty": -2.5}, BAD, "frequency_penalty"),
    ({"prompt": "hi", "repetition_penalty": 0.0}, BAD, "repetition_penalty"),
    ({"prompt": "hi", "logit_bias": {"5": -100.5}}, BAD, "logit_bias"),
    ({"prompt": "hi", "logit_bias": {"512": 1.0}}, BAD, "logit_bias"),
    ({"prompt": "hi", "logit_bias": {"1000000000": 1.0}}, BAD, "logit_bias"),
    ({"prompt": "hi", "logit_bias": {"-1": 1.0}}, BAD, "logit_bias"),
    ({"prompt": "hi", "logit_bias": {"abc": 1.0}}, BAD, "logit_bias"),
    ({"prompt": "hi", "logit_bias": {"7": 1.0, "07": 1.0}}, BAD, "logit_bias"),
    ({"prompt": "hi", "suffix": "x"}, NOT_SERVED, "suffix"),
    ({"prompt": "hi", "best_of": 4}, NOT_SERVED, "best_of"),
    ({"prompt": "hi", "service_tier": "no-such"}, BAD, "service_tier"),
    ({"prompt": "hi", "response_format": {"type": "xml"}}, NOT_SERVED, "response_format.type"),
    (
        {"prompt": "hi", "response_format": {"type": "json_schema"}},
        BAD,
        "response_format.json_schema",
    ),
    (_schema({"schema": "{}"}), BAD, "response_format.json_schema.name"),
    (_schema({"name": "x", "schema": '{"type": "nonsense"}'}), BAD, SCHEMA),
    (_schema({"name": "x", "schema": '{"properties": {"a": "string"}}'}), BAD, SCHEMA),
    (_schema({"name": "x", "schema": "[" * 3000}), BAD, SCHEMA),
    (_schema({"name": "x", "schema": '{"not": {}}'}), BAD, SCHEMA),
    (_schema({"name": "x", "schema": json.dumps({"enum": ["a" * 9000]})}), BAD, SCHEMA),
    ({"prompt": "hi", "structured_outputs": {}}, BAD, "structured_outputs"),
    (
        {"prompt": "hi", "structured_outputs": {"regex": "a", "choice": ["b"]}},
        BAD,
        "structured_outputs",
    ),
    ({"prompt": "hi", "structured_outputs": {"regex": "("}}, BAD, "structured_outputs.regex"),
    ({"prompt": "hi", "guided_regex": "a{100}{100}{100}"}, BAD, "guided_regex"),
    ({"prompt": "hi", "guided_json": "{"}, BAD, "guided_json"),
    ({"prompt": "hi", "guided_choice": ["a", ""]}, BAD, "guided_choice"),
    ({"prompt": "hi", "guided_grammar": "start: missing"}, BAD, "guided_grammar"),
    ({"prompt": "hi", "guided_regex": "a", "guided_choice": ["a"]}, BAD, "guided_choice"),
    ({"prompt": "hi", "guided_regex": "a", "ignore_eos": True}, BAD, "ignore_eos"),
]

#: What only JSON can express.
HTTP_ONLY: list[tuple[str, object, ErrorCode, str | None]] = [
    ("/v1/completions", b"", BAD, None),
    ("/v1/completions", b"{", BAD, None),
    ("/v1/completions", b'{"prompt": "a",}', BAD, None),
    ("/v1/completions", b"[]", BAD, "body"),
    ("/v1/completions", b'"hi"', BAD, "body"),
    ("/v1/completions", b"null", BAD, "body"),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', BAD, None),
    ("/v1/completions", b'{"prompt": "\\ud800"}', BAD, "prompt"),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', BAD, None),
    ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', BAD, "temperature"),
    ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 50 + b"}", BAD, "seed"),
    ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", BAD, None),
    ("/v1/completions", b"[" * 100_000, BAD, None),
    ("/v1/completions", {"prompt": {"a": 1}}, BAD, "prompt"),
    ("/v1/completions", {"prompt": ["a", 1]}, BAD, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, BAD, "prompt"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, BAD, "temperature"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, BAD, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "stream": "yes"}, BAD, "stream"),
    ("/v1/completions", {"prompt": "a", "colour": "red"}, BAD, "colour"),
    ("/v1/completions", {"prompt": "a", "messages": HI}, BAD, "messages"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, BAD, "logprobs"),
    ("/v1/chat/completions", {"messages": HI, "logprobs": 1}, BAD, "logprobs"),
    ("/v1/chat/completions", {}, BAD, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, BAD, "messages"),
    ("/v1/chat/completions", {"messages": HI, "tools": [{}]}, BAD, "tools[0].type"),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}, NOT_SERVED, "tools"),
    ("/v1/chat/completions", {"messages": HI, "tool_choice": "required"}, BAD, "tool_choice"),
    ("/v1/completions", {"prompt": "a", "tools": [TOOL]}, BAD, "tools"),
    ("/v1/completions", {"prompt": "a", "guided_json": 5}, BAD, "guided_json"),
    ("/v1/completions", {"prompt": "a", "guided_choice": "yes"}, BAD, "guided_choice"),
    ("/v1/completions", {"prompt": "a", "guided_regex": ["a"]}, BAD, "guided_regex"),
    ("/v1/completions", {"prompt": "a", "response_format": "json"}, BAD, "response_format"),
    ("/v1/completions", {"prompt": "a", "response_format": {}}, BAD, "response_format.type"),
    (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"structural_tag": "x"}},
        BAD,
        "structured_outputs.structural_tag",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
        BAD,
        "response_format.json_schema.name",
    ),
    ("/tokenize", {}, BAD, "prompt"),
    ("/tokenize", {"prompt": 5}, BAD, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, BAD, "messages"),
    ("/tokenize", {"prompt": "a", "model": "no-such"}, GONE, "model"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, BAD, "tools"),
    ("/tokenize", {"messages": HI, "tools": [TOOL]}, NOT_SERVED, "tools"),
    ("/tokenize", {"messages": HI, "tool_choice": {}}, BAD, "tool_choice"),
    ("/detokenize", {}, BAD, "tokens"),
    ("/detokenize", {"tokens": "a"}, BAD, "tokens"),
    ("/detokenize", {"tokens": [5] * 4097}, LONG, "tokens"),
    ("/detokenize", {"tokens": [512]}, BAD, "tokens"),
    ("/detokenize", b"\x00\x01", BAD, None),
]


def case_id(value: object) -> str | None:
    if isinstance(value, ErrorCode):
        return value.value
    return repr(value)[:50] if isinstance(value, (dict, bytes)) else None


async def assert_serving(front_ends: FrontEnds) -> None:
    """A request still works, nothing is in flight, no work reached a worker in between."""
    assert front_ends.router.num_requests == 0
    status, body = await front_ends.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
    assert status == 200
    assert body["usage"]["completion_tokens"] == 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_folder: Path) -> AsyncIterator[FrontEnds]:
    """One router for the whole table: each case must leave it as it was."""
    fleet = StubFleet()
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with open_front_ends(fleet, model_folder, strict_requests=True) as front_ends:
        yield front_ends
    await fleet.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tooled(model_folder: Path) -> AsyncIterator[FrontEnds]:
    """The same for a model that can be given tools."""
    fleet = StubFleet()
    await fleet.add(Role.DECODE)
    async with open_front_ends(fleet, model_folder, chat_template=str(HERMES)) as front_ends:
        yield front_ends
    await fleet.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "code", "param"), CASES, ids=case_id)
async def test_http_names_the_field(
    shared: FrontEnds, fields: dict[str, Any], code: ErrorCode, param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    await expect_http_error(shared, path, fields, code, param)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body", "code", "param"), HTTP_ONLY, ids=case_id)
async def test_what_only_json_can_express(
    shared: FrontEnds, path: str, body: object, code: ErrorCode, param: str | None
) -> None:
    await expect_http_error(shared, path, body, code, param)


async def expect_http_error(
    front_ends: FrontEnds, path: str, body: object, code: ErrorCode, param: str | None
) -> None:
    status, answer = await front_ends.post(path, body)
    error = answer["error"]
    expected = "model_not_found" if code is GONE else code.value
    assert (status, error["code"], error["param"]) == (STATUSES[code].http, expected, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "code", "param"), CASES, ids=case_id)
async def test_grpc_names_the_field(
    shared: FrontEnds, fields: dict[str, Any], code: ErrorCode, param: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in shared.inference.Generate(to_message(fields), timeout=60):
            pass
    status, trailers = status_of(caught.value)
    found = (status.name, trailers["baton-error-code"], trailers["baton-error-param"])
    assert found == (STATUSES[code].grpc, code.value, param)
    details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    bad_request = error_details_pb2.BadRequest()
    assert details.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == param


@pytest.mark.asyncio(loop_scope="module")
async def test_after_the_whole_table_nothing_has_reached_a_worker(shared: FrontEnds) -> None:
    assert [worker.submitted for worker in shared.fleet.workers] == [[], []]
    await assert_serving(shared)


async def test_paths_and_methods(front_ends: FrontEnds) -> None:
    async with front_ends.http.get(front_ends.url + "/no/such/path") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"
    async with front_ends.http.get(front_ends.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        assert "error" in await response.json()
    async with front_ends.http.get(front_ends.url + "/v1/models/no/such") as response:
        assert response.status == 404
        error = (await response.json())["error"]
        assert error["code"] == "model_not_found"
        assert (
            error["message"] == "the model 'no/such' does not exist; the one served here is 'tiny'"
        )


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/embeddings", "/v1/audio/speech"])
async def test_paths_of_the_api_that_are_not_served(front_ends: FrontEnds, path: str) -> None:
    status, answer = await front_ends.post(path, {"model": "tiny", "input": "hi"})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert "is not served here" in answer["error"]["message"]


async def test_a_field_of_the_other_kind_says_so(front_ends: FrontEnds) -> None:
    _, chat = await front_ends.post("/v1/chat/completions", {"messages": HI, "echo": True})
    assert chat["error"]["message"] == "echo is a field of completions, not of chat"
    _, completion = await front_ends.post("/v1/completions", {"prompt": "a", "tools": [TOOL]})
    assert completion["error"]["message"] == "tools is a field of chat, not of completions"


async def test_bytes_that_are_no_message(front_ends: FrontEnds) -> None:
    """Invalid UTF-8 in a string field, and a damaged message, are the client's fault."""
    call = front_ends.channel.unary_stream("/baton.v1.Inference/Generate")
    for data in (b"\x12\x02\xff\xfe", b"\x12\x7fshort", b"\xff\xff\xff"):
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in call(data, timeout=60):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["baton-error-param"] == "GenerateRequest"
    await assert_serving(front_ends)


async def test_a_field_of_a_newer_client_is_refused_not_dropped(front_ends: FrontEnds) -> None:
    call = front_ends.channel.unary_stream("/baton.v1.Inference/Generate")
    data = pb.GenerateRequest(prompt="hello").SerializeToString() + b"\xc0\x3e\x01"  # field 1000
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call(data, timeout=60):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1000" in caught.value.details()


async def test_sizes(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(
        fleet, max_body_bytes=10_000, max_message_bytes=10_000
    ) as front_ends:
        for size in (10_500, 100_000, 1_000_000):
            body = json.dumps({"prompt": "a" * size}).encode()
            status, answer = await front_ends.post("/v1/completions", body)
            assert status == 413
            assert answer["error"]["code"] == "payload_too_large"
            with pytest.raises(aio.AioRpcError) as caught:
                async for _ in front_ends.inference.Generate(
                    pb.GenerateRequest(prompt="a" * size), timeout=10
                ):
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_serving(front_ends)


async def test_a_client_that_leaves_while_sending(front_ends: FrontEnds) -> None:
    host, port = front_ends.router.addresses.http.split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    sock.close()
    await assert_serving(front_ends)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","max_tokens":1,"\\ud83d":1}',
        b'{"prompt":"a","stream_options":{"\\udc00x":1}}',
        b'{"prompt":"a","model":"\\ud83d"}',
        b'{"prompt":"a","logit_bias":{"\\ud83d":1}}',
        b'{"prompt":"a","tool_choice":{"\\ud83d":{"\\ud83d":1}}}',
        b'{"prompt":"a","response_format":{"type":"\\ud83d"}}',
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_lone_surrogate_is_not_echoed(shared: FrontEnds, body: bytes) -> None:
    """Strict readers of JSON refuse it, and UTF-8 has no form of it."""
    async with shared.http.post(f"{shared.url}/v1/completions", data=body) as response:
        raw = await response.read()
    assert response.status == 400
    error = msgspec.json.decode(raw)["error"]
    json.dumps(error, ensure_ascii=False).encode()
    assert error["param"]
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("field", ["model", "role", "unknown"])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_client_sent_is_echoed_only_in_part(shared: FrontEnds, field: str) -> None:
    front_ends = shared
    huge = "é\n" * 20_000
    bodies = {
        "model": {"messages": HI, "model": huge},
        "role": {"messages": [{"role": huge, "content": "x"}]},
        "unknown": {"messages": HI, huge: 1},
    }
    status, answer = await front_ends.post("/v1/chat/completions", bodies[field])
    assert status in (400, 404)
    assert len(answer["error"]["message"]) <= 300
    if field == "unknown":
        return
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in front_ends.inference.Generate(to_message(bodies[field]), timeout=60):
            pass
    assert caught.value.code().name in ("INVALID_ARGUMENT", "NOT_FOUND")
    assert len(caught.value.details()) <= 300


async def test_the_workers_context_counts_too(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE, max_model_len=100)
    async with make_front_ends(fleet) as front_ends:
        status, answer = await front_ends.post("/v1/completions", {"prompt": [30] * 100})
        assert status == 400
        assert "context is 100" in answer["error"]["message"]


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("levels", [65, 500, 900])
async def test_json_inside_a_request_is_as_deep_as_templates_can_follow(
    shared: FrontEnds, levels: int
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(levels)}}
    parameters = {"type": "object", "properties": json.loads(nested(levels))}
    calls = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    path = "/v1/chat/completions"
    param = "messages[1].tool_calls[0].function.arguments"
    await expect_http_error(shared, path, {"messages": calls}, BAD, param)
    param = "tools[0].function.parameters"
    await expect_http_error(shared, path, {"messages": HI, "tools": tools}, BAD, param)
    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
    tool = pb.Tool(name="f", parameters=json.dumps(parameters))
    asked = pb.ToolCall(id="c", name="f", arguments=nested(levels))
    deep = pb.Chat(messages=[*chat.messages, pb.Message(role="assistant", tool_calls=[asked])])
    for request in (
        pb.GenerateRequest(chat=chat, tools=[tool]),
        pb.GenerateRequest(chat=deep),
    ):
        await expect_grpc_error(shared, request, "INVALID_ARGUMENT")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HUGE: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": HI * 9000}, "messages"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]},
        "messages[0].content",
    ),
    "parts of many messages": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 9},
        "messages",
    ),
    "calls of many messages": (
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}] * 9},
        "messages",
    ),
    "biases": ({"prompt": "hi", "logit_bias": {str(i): 1.0 for i in range(60_000)}}, "logit_bias"),
    "prompts": ({"prompt": ["hi"] * 50_000}, "prompt"),
    "stop strings": ({"prompt": "hi", "stop": [""] * 200_000}, "stop"),
    "choices": ({"prompt": "hi", "guided_choice": ["a"] * 200_000}, "guided_choice"),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "param"), HUGE.values(), ids=HUGE)
async def test_how_many_there_are_is_looked_at_first(
    shared: FrontEnds, fields: dict[str, Any], param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    await expect_http_error(shared, path, fields, BAD, param)
    await expect_grpc_error(shared, to_message(fields), "INVALID_ARGUMENT")


@pytest.mark.asyncio(loop_scope="module")
async def test_millions_of_unknown_fields(shared: FrontEnds) -> None:
    call = shared.channel.unary_stream("/baton.v1.Inference/Generate")
    start = time.process_time()
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call(b"\xc0\x3e\x01" * 1_000_000, timeout=60):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "3000000 bytes of unknown fields" in caught.value.details()
    assert time.process_time() - start < 5  # listing them would take far more


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("where", ["name", "description", "parameters", "arguments"])
async def test_text_beside_the_messages_counts_too(
    tooled: FrontEnds, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Far too much of it is refused without tokenising all of it."""
    text, longest, encode = "lazy dog " * 200_000, 0, ModelText.encode

    def measured(self: ModelText, text: str, **options: bool) -> tuple[int, ...]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(ModelText, "encode", measured)
    function: dict[str, Any] = {"name": "f"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    if where == "description":
        function["description"] = text
    elif where == "parameters":
        function["parameters"] = {"type": "object", "title": text}
    elif where == "arguments":
        call["function"]["arguments"] = json.dumps({"a": text})
    else:
        call["function"]["name"] = text
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    status, answer = await tooled.post("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert longest < 10_000


async def expect_grpc_error(front_ends: FrontEnds, request: pb.GenerateRequest, code: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in front_ends.inference.Generate(request, timeout=60):
            pass
    assert caught.value.code().name == code


async def test_more_sequences_than_can_ever_run_name_the_field_that_asks_for_them(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, max_requests=2) as front_ends:
        for fields, param in (({"prompt": ["a", "b", "c"]}, "prompt"), ({"n": 3}, "n")):
            status, answer = await front_ends.post("/v1/completions", {"prompt": "a", **fields})
            assert (status, answer["error"]["param"]) == (400, param)
            assert answer["error"]["message"].startswith(f"{param} asks for 3 sequences")


async def test_texts_that_wait_to_be_tokenised_are_bounded(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    async with make_front_ends(fleet, max_requests=2) as front_ends:
        blocked = threading.Event()
        for _ in range(front_ends.router.config.text_threads):
            front_ends.router._model._short.submit(blocked.wait)
        waiting = [
            asyncio.create_task(front_ends.post("/tokenize", {"prompt": "hello"})),
            asyncio.create_task(front_ends.post("/detokenize", {"tokens": [1, 2]})),
        ]
        await until(lambda: front_ends.router._service._num_texts == 2)
        status, answer = await front_ends.post("/tokenize", {"prompt": "hello"})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        with pytest.raises(aio.AioRpcError) as caught:
            await front_ends.inference.Detokenize(pb.DetokenizeRequest(tokens=[1]), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        blocked.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_an_answer_may_be_larger_than_a_request(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, max_message_bytes=1000) as front_ends:
        request = pb.GenerateRequest(prompt="hello", max_tokens=100, stream=False, logprobs=True)
        (answer,) = [
            message async for message in front_ends.inference.Generate(request, timeout=60)
        ]
        assert answer.ByteSize() > 1000
        assert len(answer.choices[0].logprobs) == 100
