"""Random requests: never an INTERNAL or a 5xx, never a hang, and nothing left in flight."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc import aio

from protocol.wire import inference_pb2 as pb
from router.request.body import HARMLESS, UNSERVED
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.generate_request import RequestKind
from tests.support.router_front_ends import FrontEnds, until

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 16, 17, 511, 512, 2**31, 2**63, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-7, 1e308, "", "a", "hello", "\u0000", "é🙂", "x" * 3000),
    *(
        [],
        {},
        [[]],
        [0],
        [1, 2],
        [-1],
        ["a"],
        ["a", 1],
        [None],
        {"type": "text"},
        {"a": []},
        {"30": -5},
    ),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": 1, "content": 2}]),
]
FIELDS = [
    *sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}),
    "nonsense",
    *sorted(UNSERVED),
    *sorted(HARMLESS),
]


ODD_SCALARS: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_INT64: [0, 1, -1, 2, 7, 17, 512, 2**31, 2**63 - 1, -(2**63)],
    FieldDescriptor.TYPE_DOUBLE: [0.0, 0.5, 1.0, -2.5, 1e-7, 1e308, math.inf, -math.inf, math.nan],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_STRING: ["", "a", "tiny", "é🙂", "x" * 3000],
}


def random_body(rng: random.Random, kind: RequestKind) -> dict[str, Any]:
    """A good request with up to three fields made odd."""
    good: dict[str, Any] = {"max_tokens": 3}
    if kind is RequestKind.CHAT:
        good["messages"] = [{"role": "user", "content": "hello"}]
    else:
        good["prompt"] = "hello"
    odd = {rng.choice(FIELDS): rng.choice(ODD) for _ in range(rng.randint(0, 3))}
    return good | odd


async def test_random_json(front_ends: FrontEnds) -> None:
    rng = random.Random(11)
    statuses: Counter[int] = Counter()
    for _ in range(400):
        kind = rng.choice(list(RequestKind))
        path = "/v1/chat/completions" if kind is RequestKind.CHAT else "/v1/completions"
        body = random_body(rng, kind)
        async with front_ends.http.post(front_ends.url + path, json=body) as response:
            text = await response.text()
            in_time = body.get("timeout") != 1e-7
            assert response.status in ((200, 400, 404) if in_time else (400, 404, 504)), (
                body,
                text,
            )
            if response.status != 200:
                error = (await response.json())["error"]
                assert error["message"]
            statuses[response.status] += 1
    assert min(statuses[200], statuses[400]) > 30
    await until(lambda: front_ends.router.num_requests == 0)


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
#: Whole requests of each API, of which a part is made odd.
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "reasoning_content": "a"},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        "documents": [{"title": "a"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 3,
    },
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
    },
    "/v1/responses": {
        "max_output_tokens": 3,
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "b"}]},
            {"role": "assistant", "content": "b"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "web_search"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "store": True,
    },
}
RICH["/v1/messages/count_tokens"] = RICH["/v1/messages"]
RICH["/v1/responses/input_tokens"] = RICH["/v1/responses"]


def with_odd_part(value: Any, rng: random.Random) -> Any:
    """A copy with something odd at a random place, or beside it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.25:
        return rng.choice(ODD)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], with_odd_part(value[at], rng), *value[at + 1 :]]
    if rng.random() < 0.2:
        return value | {rng.choice(["nonsense", "cache_control", "index"]): rng.choice(ODD)}
    name = rng.choice(list(value))
    return value | {name: with_odd_part(value[name], rng)}


async def test_random_parts_of_every_api(front_ends: FrontEnds) -> None:
    rng = random.Random(12)
    statuses: Counter[int] = Counter()
    for _ in range(400):
        path, body = rng.choice(list(RICH.items()))
        body = {
            name: with_odd_part(part, rng) if rng.random() < 0.2 else part
            for name, part in body.items()
        }
        async with front_ends.http.post(front_ends.url + path, json=body) as response:
            answer = await response.json()
            assert response.status in (200, 400), (path, body, answer)
            if response.status != 200:
                assert answer["error"]["message"]
            statuses[response.status] += 1
    assert min(statuses[200], statuses[400]) > 30
    await until(lambda: front_ends.router.num_requests == 0)


def make_odd(message: Message, field: FieldDescriptor, rng: random.Random, value: Any) -> None:
    """Set one field of any kind to `value` (a scalar), or to something random inside."""
    if field.message_type is None:
        if field.is_repeated:
            getattr(message, field.name).extend([value] * rng.randint(1, 3))
        else:
            setattr(message, field.name, value)
    elif field.message_type.GetOptions().map_entry:
        keys = ODD_SCALARS[field.message_type.fields_by_name["key"].type]
        getattr(message, field.name)[rng.choice(keys)] = value
    else:
        inside = getattr(message, field.name)
        inner = inside.add() if field.is_repeated else inside
        inner.SetInParent()
        fields = inner.DESCRIPTOR.fields
        for chosen in rng.sample(list(fields), rng.randint(0, len(fields))):
            make_odd(inner, chosen, rng, rng.choice(values_of(chosen)))


def values_of(field: FieldDescriptor) -> list[Any]:
    """Odd scalars for a field, or as many Nones as there should be random insides."""
    if field.message_type is None:
        return ODD_SCALARS[field.type]
    if field.message_type.GetOptions().map_entry:
        return ODD_SCALARS[field.message_type.fields_by_name["value"].type]
    return [None] * 8


def random_message(rng: random.Random) -> pb.GenerateRequest:
    """A good request with up to three fields made odd."""
    request = pb.GenerateRequest(prompt="hello", max_tokens=3)
    for field in rng.sample(list(pb.GenerateRequest.DESCRIPTOR.fields), rng.randint(0, 3)):
        make_odd(request, field, rng, rng.choice(values_of(field)))
    return request


async def outcome(front_ends: FrontEnds, request: pb.GenerateRequest) -> str:
    """The name of the status that a call ends in."""
    try:
        async for _ in front_ends.inference.Generate(request, timeout=60):
            pass
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_random_messages(front_ends: FrontEnds) -> None:
    rng = random.Random(12)
    codes: Counter[str] = Counter()
    for _ in range(400):
        request = random_message(rng)
        code = await outcome(front_ends, request)
        allowed = code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
        assert allowed or request.HasField("timeout"), f"{code}: {request}"
        codes[code] += 1
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 30
    await until(lambda: front_ends.router.num_requests == 0)


GOOD: list[Message] = [
    pb.GenerateRequest(prompt="hello", max_tokens=3),
    pb.TokenizeRequest(prompt="hello"),
    pb.DetokenizeRequest(tokens=[5]),
    pb.ListModelsRequest(),
]


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.DESCRIPTOR.name)
async def test_every_field_of_every_request_made_odd(front_ends: FrontEnds, good: Message) -> None:
    rng = random.Random(13)
    name = good.DESCRIPTOR.name.removesuffix("Request")
    for field in good.DESCRIPTOR.fields:
        for value in values_of(field):
            request = type(good)()
            request.CopyFrom(good)
            make_odd(request, field, rng, value)
            code = await (outcome if name == "Generate" else unary_outcome)(front_ends, request)
            expected = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
            if field.name == "timeout":
                expected.add("DEADLINE_EXCEEDED")
            assert code in expected, f"{code}: {request}"
    await until(lambda: front_ends.router.num_requests == 0)


async def unary_outcome(front_ends: FrontEnds, request: Message) -> str:
    """The name of the status that a call of the method of this request ends in."""
    method = getattr(front_ends.inference, request.DESCRIPTOR.name.removesuffix("Request"))
    try:
        await method(request, timeout=60)
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"
