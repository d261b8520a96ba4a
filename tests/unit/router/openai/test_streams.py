"""Streams on both front ends: their text is that of the same request not streamed;
many at once lose nothing, and the one beyond the bound is told so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import grpc
import pytest
from grpc import aio

from observability import metrics
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.text.tokenizer import ModelText
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, status_of, until
from tests.support.stub_workers import StubFleet

HARD_TEXTS = {
    "emoji": "ok 🙂🙃 👍🏽 🇩🇪!",
    "a family joined by ZWJ": "see 👩‍👩‍👧‍👦, and 👨‍👩‍👧",
    "CJK": "你好世界。今天天气很好、こんにちは 안녕하세요",
    "combining marks": "e\u0301te\u0301 a\u0308\u0323 नमस्ते ते",
    "quotes and controls": 'a "quoted"\\ back\\slash\n\ttab \u0001\u007f\u2028 </script>',
}
#: text as made, stop strings, text as it must be shown
STOPS = {
    "across tokens": ("ABCDEFGHIJ tail", ["DEFGHIJ"], "ABC"),
    "at the very end": ("all of it.END", ["END"], "all of it."),
    "at the very start": ("ENDall of it", ["END"], ""),
    "almost, then not": ("say DEFGHIK done", ["DEFGHIJ"], "say DEFGHIK done"),
    "the first to be complete": ("one two three", ["two three", "two"], "one "),
    "inside a character's bytes": ("x🙂y🙂z", ["y🙂"], "x🙂"),
    "a line break": ("hello\nUser: hi", ["\nUser:"], "hello"),
    "held back at the end": ("the end DEFG", ["DEFGHIJ"], "the end DEFG"),
}


def split(text: ModelText, sample: str, how: str) -> list[int]:
    """A text as ids: as the tokenizer would, byte by byte, or with special tokens in between."""
    if how == "tokens":
        return list(text.encode(sample, add_special_tokens=False))
    ids = letters(sample)
    return ids if how == "bytes" else [i for each in ids for i in (each, 0)]


async def over_http(
    front_ends: FrontEnds, kind: str, *, stream: bool, **fields: object
) -> tuple[str, str]:
    """Text and finish reason."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "hello you"}]}
    body = (asked if kind == "chat" else {"prompt": "hello you"}) | fields
    if not stream:
        status, answer = await front_ends.post(path, body)
        assert status == 200, answer
        choice = answer["choices"][0]
        text = choice["message"]["content"] if kind == "chat" else choice["text"]
        return text, choice["finish_reason"]
    async with front_ends.http.post(
        front_ends.url + path, json=body | {"stream": True}
    ) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, end = (await response.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    texts = [c["delta"].get("content", "") if kind == "chat" else c["text"] for c in choices]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(texts), choices[-1]["finish_reason"]


async def over_grpc(front_ends: FrontEnds, *, stream: bool, **fields: object) -> tuple[str, str]:
    """Text and finish reason."""
    request = pb.GenerateRequest(prompt="hello you", stream=stream, **fields)
    choices = [
        c async for m in front_ends.inference.Generate(request, timeout=60) for c in m.choices
    ]
    reasons = [c.finish_reason for c in choices if c.HasField("finish_reason")]
    assert len(reasons) == 1
    return "".join(choice.text for choice in choices), reasons[0]


async def every_way(front_ends: FrontEnds, **fields: object) -> list[tuple[str, str]]:
    """The same request over both front ends, chat and completion, streamed and whole."""
    return await asyncio.gather(
        *(
            over_http(front_ends, kind, stream=stream, **fields)
            for kind in ("chat", "completion")
            for stream in (True, False)
        ),
        *(over_grpc(front_ends, stream=stream, **fields) for stream in (True, False)),
    )


@pytest.mark.parametrize("how", ["tokens", "bytes", "special between"])
@pytest.mark.parametrize("sample", HARD_TEXTS.values(), ids=HARD_TEXTS)
async def test_hard_texts_are_the_same_every_way(
    front_ends: FrontEnds, text: ModelText, sample: str, how: str
) -> None:
    ids = split(text, sample, how)
    front_ends.say(ids)
    assert await every_way(front_ends, max_tokens=len(ids)) == [(sample, "length")] * 6


@pytest.mark.parametrize("how", ["tokens", "bytes"])
@pytest.mark.parametrize(("sample", "stop", "expected"), STOPS.values(), ids=STOPS)
async def test_stop_strings_cut_the_same_every_way(
    front_ends: FrontEnds, text: ModelText, sample: str, stop: list[str], expected: str, how: str
) -> None:
    ids = split(text, sample, how)
    front_ends.say(ids)
    reason = "length" if expected == sample else "stop"
    assert await every_way(front_ends, max_tokens=len(ids), stop=stop) == [(expected, reason)] * 6


async def test_tokens_come_with_the_whole_of_their_text(
    front_ends: FrontEnds, text: ModelText
) -> None:
    """Each ends as a stop string begins: a client goes on behind the tokens that it has."""
    ids = list(text.encode("the quick brown fox and the lazy dog", add_special_tokens=False))
    assert any(len(text.decode([token])) > 2 for token in ids)
    front_ends.say(ids)
    stop = sorted({text.decode([token])[-1] + "~" for token in ids})
    request = pb.GenerateRequest(prompt="hello you", max_tokens=len(ids), stop=stop)
    seen, came = "", list[int]()
    async for message in front_ends.inference.Generate(request, timeout=60):
        for choice in message.choices:
            seen, came = seen + choice.text, [*came, *choice.token_ids]
            assert seen == text.decode(came)
    assert came == ids


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], [(1, "l"), (1, ""), (1, ""), (1, ""), (1, "🙂"), (1, "o")]),
        (["🙂!"], [(1, "l"), (1, ""), (1, ""), (1, ""), (2, "🙂o")]),
        (["l🙂!"], [(6, "l🙂o")]),
    ],
)
async def test_tokens_do_not_wait_for_the_rest_of_their_character(
    front_ends: FrontEnds, stop: list[str], expected: list[tuple[int, str]]
) -> None:
    """Only for what may be a stop string."""
    front_ends.say(letters("l🙂o"))
    request = pb.GenerateRequest(prompt="hello", max_tokens=6, stop=stop)
    stream = front_ends.inference.Generate(request, timeout=60)
    choices = [choice async for message in stream for choice in message.choices]
    assert [(len(choice.token_ids), choice.text) for choice in choices] == expected


async def test_a_character_cut_by_max_tokens_ends_in_a_replacement_every_way(
    front_ends: FrontEnds,
) -> None:
    ids = letters("ok 🙂")
    front_ends.say(ids)
    assert await every_way(front_ends, max_tokens=len(ids) - 1) == [("ok \ufffd", "length")] * 6


async def test_a_large_answer_arrives_whole(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    word = letters("0123456789abcdef")
    await fleet.add(Role.DECODE, script=lambda s: word * 80, num_blocks=256)
    async with make_front_ends(fleet, max_model_len=4096) as front_ends:
        front_ends.router._model.context = 4096
        whole = await over_http(front_ends, "completion", stream=False, max_tokens=1280)
        streamed = await over_grpc(front_ends, stream=True, max_tokens=1280)
    assert whole == streamed == ("0123456789abcdef" * 80, "length")


async def test_the_first_token_is_sent_before_the_second_is_made(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event(), script=lambda s: letters("ab"))
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": "hi", "max_tokens": 2, "stream": True}
        async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
            first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
            assert json.loads(first[6:])["choices"][0]["text"] == "a"
            worker.gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        worker.gate.clear()
        call = front_ends.inference.Generate(
            pb.GenerateRequest(prompt="hi", max_tokens=2), timeout=60
        )
        assert (await asyncio.wait_for(call.read(), 60)).choices[0].text == "a"
        worker.gate.set()
        assert (await call.read()).choices[0].text == "b"


async def test_usage_in_every_chunk(front_ends: FrontEnds) -> None:
    front_ends.say(letters("abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hi", "max_tokens": 3, "stream": True, "stream_options": options}
    async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
        *events, _, _ = (await response.text()).split("\n\n")
    usages = [json.loads(event[6:])["usage"]["completion_tokens"] for event in events]
    assert usages == [1, 2, 3, 3]
    request = pb.GenerateRequest(
        prompt="hi", max_tokens=3, stream_options=pb.StreamOptions(**options)
    )
    messages = [m async for m in front_ends.inference.Generate(request, timeout=60)]
    assert [m.usage.completion_tokens for m in messages] == [1, 2, 3, 3]
    alone = body | {"stream_options": {"continuous_usage_stats": True}}
    status, answer = await front_ends.post("/v1/completions", alone)
    assert (status, answer["error"]["param"]) == (400, "stream_options.continuous_usage_stats")


STREAMS = 100


@pytest.mark.parametrize("front_end", ["http", "grpc"])
async def test_as_many_streams_as_allowed_and_one_more(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, front_end: str
) -> None:
    worker = await fleet.add(Role.DECODE, gate=asyncio.Event(), script=lambda s: letters("hello"))

    async def one(front_ends: FrontEnds) -> tuple[str, str]:
        if front_end == "http":
            return await over_http(front_ends, "completion", stream=True, max_tokens=5)
        return await over_grpc(front_ends, stream=True, max_tokens=5)

    async with make_front_ends(fleet, max_requests=STREAMS) as front_ends:
        front_ends.http.connector._limit = 0
        streams = [asyncio.create_task(one(front_ends)) for _ in range(STREAMS)]
        await until(lambda: len(worker.submitted) == STREAMS)
        assert front_ends.router.num_requests == STREAMS
        await refused(front_ends)
        worker.gate.set()
        assert await asyncio.gather(*streams) == [("hello", "length")] * STREAMS
        await until(lambda: front_ends.router.num_requests == 0)
        assert await one(front_ends) == ("hello", "length")


async def refused(front_ends: FrontEnds) -> None:
    """One more request, on both front ends."""
    body = {"prompt": "one more", "max_tokens": 5, "stream": True}
    async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert (await response.json())["error"]["code"] == "overloaded"
    with pytest.raises(aio.AioRpcError) as caught:
        await over_grpc(front_ends, stream=True, max_tokens=5)
    code, trailers = status_of(caught.value)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert float(trailers["retry-after"]) > 0


async def test_a_burst_of_calls_is_bounded_by_us_alone(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """gRPC's own bound on calls that wait for a handler would cancel some at random."""
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        calls = [front_ends.inference.ListModels(pb.ListModelsRequest()) for _ in range(2500)]
        codes = {await call.code() for call in calls}
    assert codes == {grpc.StatusCode.OK}


async def test_a_client_that_does_not_read_is_left_at_its_deadline(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE, script=lambda s: letters("x" * 480))
    async with make_front_ends(fleet) as front_ends:
        for server in front_ends.router._http._server.servers:
            for listener in server.sockets:  # what it accepts has the same small buffer
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": "hello", "n": 4, "max_tokens": 480, "timeout": 3.0}
        data = json.dumps(body | {"stream": True}).encode()
        host, port = front_ends.router.addresses.http.split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            began = time.monotonic()
            deaf.sendall(head.encode() + data)
            await until(lambda: len(worker.submitted) == 4)
            await until(lambda: not worker.running)
            await until(lambda: front_ends.router.num_requests == 0)
            assert time.monotonic() - began >= 3.0  # held till then, made and not read
            failures = front_ends.router.metrics.value(
                metrics.REQUEST_FAILURES, door="http", code="deadline_exceeded"
            )
            assert failures == 1
            assert await over_grpc(front_ends, stream=True, max_tokens=3) == ("xxx", "length")


async def test_heads_have_bounds(front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.openai.server.HEAD_S", 0.3)
    where = front_ends.router.addresses.http.split(":")
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    for _ in range(20):
        writer.write(b"x-long: " + b"a" * 10_000 + b"\r\n")
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 400")
    writer.close()

    async def begin(beginning: bytes) -> None:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(beginning)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    async def keep_alive() -> None:  # which is not to send no head
        reader, writer = await asyncio.open_connection(*where)
        for pause in (0.4, 0.4, 0):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"}"), 60)).endswith(b'"ok"}')
            await asyncio.sleep(pause)
        writer.close()

    beginnings = (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nhost: x\r\n")
    await asyncio.gather(keep_alive(), *map(begin, beginnings))
