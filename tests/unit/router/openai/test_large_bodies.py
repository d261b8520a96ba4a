"""Large requests: refused by size with a clear error, and never in the way of others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from protocol.errors import Cancelled, Overloaded, PayloadTooLarge
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.offload import encode, encode_in_pieces
from router.openai.exchange import BodyReader
from router.text.tokenizer import ModelText
from tests.support import services
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, status_of
from tests.support.stub_workers import StubFleet

MB = 1_000_000
SENTENCE = "the quick brown fox jumps over the lazy dog. "


def text_of(size: int) -> str:
    return (SENTENCE * (size // len(SENTENCE) + 1))[:size]


class Streams:
    """Requests that stream while something large is going on."""

    def __init__(self, front_ends: FrontEnds, count: int, max_tokens: int) -> None:
        body = {"prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body["return_token_ids"] = True
        self.tokens = [0] * count
        self._front_ends = front_ends
        self._tasks = [asyncio.create_task(self._run(i, body)) for i in range(count)]

    async def _run(self, number: int, body: dict) -> None:
        url = self._front_ends.url + "/v1/completions"
        async with self._front_ends.http.post(url, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    self.tokens[number] += sum(len(choice["token_ids"]) for choice in choices)

    async def more(self) -> None:
        """Return once every stream has got another token."""
        before = list(self.tokens)
        async with asyncio.timeout(60):
            while any(now <= then for now, then in zip(self.tokens, before, strict=True)):
                await asyncio.sleep(0.002)

    async def whole(self) -> list[int]:
        """Tokens of each, once all have ended."""
        await asyncio.gather(*self._tasks)
        return self.tokens


@pytest.fixture
async def front_ends(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> AsyncIterator[FrontEnds]:
    await fleet.add(Role.DECODE, delay_s=0.05, num_blocks=4096)
    async with make_front_ends(fleet) as front_ends:
        yield front_ends


async def send(front_ends: FrontEnds, size: int) -> tuple[int, dict]:
    return await front_ends.post("/v1/completions", json.dumps({"prompt": text_of(size)}).encode())


async def call(front_ends: FrontEnds, size: int) -> tuple[grpc.StatusCode, dict]:
    options = [("grpc.max_send_message_length", -1)]
    async with aio.insecure_channel(front_ends.router.addresses.grpc, options=options) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            request = pb.GenerateRequest(prompt=text_of(size))
            await services.InferenceStub(channel).Generate(request).read()
        return status_of(caught.value)[0], {"message": caught.value.details()}


async def test_large_requests_beside_running_streams(front_ends: FrontEnds) -> None:
    streams = Streams(front_ends, 8, max_tokens=150)
    await streams.more()
    status, answer = await send(front_ends, 5 * MB)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "prompt"
    assert (await call(front_ends, 5 * MB))[0] is grpc.StatusCode.INVALID_ARGUMENT
    for size in (9 * MB, 30 * MB):
        status, answer = await send(front_ends, size)
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")
        assert "8388608 bytes" in answer["error"]["message"]
        code, answer = await call(front_ends, size)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8388608" in answer["message"]
    front_ends.fleet.workers[0].delay_s = 0
    assert await streams.whole() == [150] * 8


async def test_the_limits_can_be_raised(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    limits = {"max_body_bytes": 16 << 20, "max_message_bytes": 16 << 20}
    async with make_front_ends(fleet, **limits) as front_ends:
        status, answer = await send(front_ends, 12 * MB)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert (await call(front_ends, 12 * MB))[0] is grpc.StatusCode.INVALID_ARGUMENT


def rounds_beside_tokenising(text: ModelText) -> int:
    """How often another thread gets the interpreter's lock, which tokenising must not hold."""
    work = threading.Thread(target=text.encode, args=(text_of(400_000),))
    rounds = 0
    work.start()
    while work.is_alive():
        time.sleep(0.0005)
        rounds += 1
    return rounds


def test_tokenising_lets_other_threads_run(text: ModelText) -> None:
    """Once at least, on a machine that may be too busy for both; with the lock held, never."""
    assert any(rounds_beside_tokenising(text) > 10 for _ in range(20))


async def test_many_tokens_are_written_beside_the_event_loop(
    front_ends: FrontEnds, text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(value: object) -> str:
        threads.append(threading.current_thread())
        return encode_in_pieces(value)

    monkeypatch.setattr("router.openai.exchange.encode_in_pieces", noted)
    for size in (40, 9000):
        prompt = text_of(size)
        status, answer = await front_ends.post("/tokenize", {"prompt": prompt})
        assert (status, answer["tokens"]) == (200, list(text.encode(prompt)))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    ids = tuple(range(1000))
    assert encode_in_pieces({"tokens": ids, "few": [[], [1]]}) == encode(
        {"tokens": ids, "few": [[], [1]]}
    )


async def test_health_and_streams_go_on_while_a_prompt_is_tokenised(
    front_ends: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising is held still until health has answered and every stream has gone on."""
    streams = Streams(front_ends, 5, max_tokens=400)  # for 20 s, if need be
    await streams.more()
    busy, go_on = threading.Event(), threading.Event()
    encode = ModelText.encode

    def slow(self: ModelText, text: str, **options: bool) -> tuple[int, ...]:
        if len(text) > 1000:
            busy.set()
            assert go_on.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(ModelText, "encode", slow)
    sending = asyncio.create_task(send(front_ends, 5 * MB))
    assert await asyncio.to_thread(busy.wait, 60)
    async with front_ends.http.get(front_ends.url + "/health") as response:
        assert response.status == 200
    await streams.more()
    status, _ = await front_ends.post("/v1/completions", {"prompt": "short", "max_tokens": 2})
    assert status == 200
    assert not sending.done()
    go_on.set()
    front_ends.fleet.workers[0].delay_s = 0
    assert (await sending)[0] == 400
    assert await streams.whole() == [400] * 5


async def test_bodies_on_their_way_have_a_bound_and_count_until_they_are_parsed() -> None:
    reader, scope = BodyReader(1000), {"headers": []}
    held = asyncio.Event()

    def receive(size: int, end: str = "http.request") -> Any:
        parts = [{"type": "http.request", "body": bytes(size), "more_body": True}, {"type": end}]

        async def next_part() -> dict[str, Any]:
            if len(parts) == 1 and size == 1000:
                await held.wait()
            return parts.pop(0)

        return next_part

    for _ in range(2 * 64):  # one after another
        assert await reader._read(scope, receive(999), len) == 999
        with pytest.raises(Cancelled):
            await reader._read(scope, receive(999, "http.disconnect"), len)
        with pytest.raises(PayloadTooLarge):
            await reader._read(scope, receive(1001), len)
    reading = [asyncio.create_task(reader._read(scope, receive(1000), len)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await reader._read(scope, receive(1), len)
    held.set()
    assert set(await asyncio.gather(*reading)) == {1000}
    assert await reader._read(scope, receive(1), len) == 1
