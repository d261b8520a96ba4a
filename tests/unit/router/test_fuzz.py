"""Random requests: never an INTERNAL or a 5xx, never a hang, and nothing left in flight."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from grpc import aio

from protocol.wire import inference_pb2 as pb
from router.request import _SERVED, RequestKind
from router.unserved import HARMLESS, UNSERVED
from tests.support.router_doors import Doors, until

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
    *sorted(_SERVED[RequestKind.CHAT] | _SERVED[RequestKind.COMPLETION]),
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


async def test_random_json(doors: Doors) -> None:
    rng = random.Random(11)
    statuses: Counter[int] = Counter()
    for _ in range(400):
        kind = rng.choice(list(RequestKind))
        path = "/v1/chat/completions" if kind is RequestKind.CHAT else "/v1/completions"
        body = random_body(rng, kind)
        async with doors.http.post(doors.url + path, json=body) as response:
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
    await until(lambda: doors.router.num_requests == 0)


def random_message(rng: random.Random) -> pb.GenerateRequest:
    """A good request with up to three scalar fields made odd."""
    request = pb.GenerateRequest(prompt="hello", max_tokens=3)
    scalars = [f for f in pb.GenerateRequest.DESCRIPTOR.fields if f.message_type is None]
    for field in rng.sample(scalars, rng.randint(0, 3)):
        value = rng.choice(ODD_SCALARS[field.type])
        if field.is_repeated:
            getattr(request, field.name).append(value)
        else:
            setattr(request, field.name, value)
    return request


async def outcome(doors: Doors, request: pb.GenerateRequest) -> str:
    """The name of the status that a call ends in."""
    try:
        async for _ in doors.inference.Generate(request, timeout=20):
            pass
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_random_messages(doors: Doors) -> None:
    rng = random.Random(12)
    codes: Counter[str] = Counter()
    for _ in range(400):
        request = random_message(rng)
        code = await outcome(doors, request)
        allowed = code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
        assert allowed or request.HasField("timeout"), f"{code}: {request}"
        codes[code] += 1
    assert min(codes["OK"], codes["INVALID_ARGUMENT"]) > 30
    await until(lambda: doors.router.num_requests == 0)
