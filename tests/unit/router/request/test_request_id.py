"""What a request is called: by us, and by the client."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import openai
import pytest
from grpc import aio

from protocol.errors import Internal
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.request.generate_request import make_request_id
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, status_of
from tests.support.stub_workers import StubFleet
from tests.unit.router.openai.test_connection import connected

OWN = re.compile("[0-9a-f]{32}")
BODY = {"prompt": "hello", "max_tokens": 3}


async def ask(
    front_ends: FrontEnds, path: str, method: str = "POST", given: str | None = None
) -> Any:
    headers = {} if given is None else {"X-Request-ID": given}
    body = BODY if method == "POST" else None
    async with front_ends.http.request(
        method, front_ends.url + path, json=body, headers=headers
    ) as response:
        await response.read()
        return response


@pytest.mark.parametrize("given", ["a", "trace 7/b", "~" * 128])
def test_a_sane_name_is_taken_over_and_never_as_the_key(given: str) -> None:
    first, second = make_request_id(given), make_request_id(f"{given} \t")
    assert first.name == second.name == given
    assert len({first.key, second.key, given}) == 3


@pytest.mark.parametrize("given", [None, "", "~" * 129, "é", "a\tb", "a\x7fb"])
def test_any_other_is_ignored(given: str | None) -> None:
    called = make_request_id(given)
    assert called.name == called.key
    assert OWN.fullmatch(called.key)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/completions", "POST", 200),
        ("/tokenize", "POST", 200),
        ("/v1/chat/completions", "POST", 400),
        ("/detokenize", "POST", 400),
        ("/nowhere", "GET", 404),
        ("/health", "POST", 405),
        ("/health", "GET", 200),
        ("/health", "HEAD", 200),
        ("/metrics", "GET", 200),
    ],
)
async def test_every_answer_has_one(
    front_ends: FrontEnds, path: str, method: str, status: int
) -> None:
    made = await ask(front_ends, path, method)
    assert made.status == status
    assert OWN.fullmatch(made.headers["x-request-id"])
    assert (
        made.headers.get("baton-request-id", made.headers["x-request-id"])
        == (made.headers["x-request-id"])
    )
    given = await ask(front_ends, path, method, given="mine")
    assert given.headers.getall("x-request-id") == ["mine"]
    assert given.headers.get("baton-request-id") != "mine"
    ignored = await ask(front_ends, path, method, given="x" * 200)
    assert OWN.fullmatch(ignored.headers["x-request-id"])


async def test_two_clients_may_use_the_same(front_ends: FrontEnds) -> None:
    answers = [await ask(front_ends, "/v1/completions", given="same") for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same"] * 2
    keys = [answer.headers["baton-request-id"] for answer in answers]
    submitted = [submit.key.request_id for submit in front_ends.fleet.workers[1].submitted]
    assert submitted == [f"{key}-0" for key in keys]
    assert len(set(keys)) == 2


async def test_answers_made_before_there_is_a_request_have_one(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with (
        make_front_ends(fleet, max_connections=1) as front_ends,
        connected(front_ends) as first,
    ):
        first.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await first.answer() == (200, {"status": "ok"})
        async with connected(front_ends) as refused:
            answers = [await refused.reader.read()]
        first.writer.write(b"nonsense\r\n\r\n")
        answers.append(await first.reader.read())
    for answer, status in zip(answers, (503, 400), strict=True):
        head, body = answer.decode().split("\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert re.search("\r\nx-request-id: [0-9a-f]{32}\r\n", head)
        assert json.loads(body)["error"]["message"]


async def test_openais_client_knows_it(front_ends: FrontEnds) -> None:
    client = openai.AsyncOpenAI(base_url=front_ends.url + "/v1", api_key="none", max_retries=0)
    made = await client.completions.create(model="tiny", **BODY)
    assert made.id == f"cmpl-{made._request_id}"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(
            model="none", **BODY, extra_headers={"x-request-id": "mine"}
        )
    assert caught.value.request_id == "mine"
    await client.close()


async def test_logs_say_it(front_ends: FrontEnds, caplog: pytest.LogCaptureFixture) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 1, False
    decode.fail_error = Internal("the engine broke")
    caplog.set_level(logging.ERROR, logger="baton")
    answer = await ask(front_ends, "/v1/completions", given="mine")
    assert answer.status == 500
    (record,) = (r for r in caplog.records if r.message == "request failed")
    assert record.request_name == "mine"
    assert record.request == decode.submitted[0].key.request_id.removesuffix("-0")


async def test_over_grpc_it_is_a_trailer(front_ends: FrontEnds) -> None:
    metadata = (("x-request-id", "mine"),)
    request = pb.GenerateRequest(**BODY, stream=False, timeline=True)
    call = front_ends.inference.Generate(request, metadata=metadata)
    (message,) = [message async for message in call]
    trailers = dict(await call.trailing_metadata())
    assert trailers["x-request-id"] == "mine" != message.id
    assert "baton-timeline" in trailers
    call = front_ends.inference.Generate(pb.GenerateRequest(**BODY, stream=False))
    (message,) = [message async for message in call]
    assert dict(await call.trailing_metadata())["x-request-id"] == message.id
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in front_ends.inference.Generate(pb.GenerateRequest(), metadata=metadata):
            pass
    _, failed = status_of(caught.value)
    assert (failed["x-request-id"], failed["baton-error-code"]) == ("mine", "invalid_request")
