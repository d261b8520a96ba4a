"""The official client, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

from protocol.errors import Internal, Overloaded
from tests.support.router_front_ends import FrontEnds, letters

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(front_ends: FrontEnds) -> AsyncIterator[AsyncOpenAI]:
    front_ends.say(letters("Hi 🙂 there, friend"))
    async with AsyncOpenAI(
        base_url=front_ends.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=7)
    assert answer.choices[0].message.content == "Hi 🙂"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7


async def test_chat_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=13,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hi 🙂 there"
    assert chunks[-1].usage.completion_tokens == 13


async def test_streaming_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, stop=" there"
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hi 🙂"


async def test_completions_with_n(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="hello", n=3, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["Hi"] * 3
    stream = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=7, stop="there", stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hi 🙂"


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "baton"


async def test_errors_are_the_clients_own_classes(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    for worker in front_ends.fleet.workers:
        worker.refuse = Overloaded("full", retry_after_s=2)
    with pytest.raises(RateLimitError) as full:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert full.value.response.headers["retry-after"] == "2"


async def test_a_failure_in_mid_stream_raises(client: AsyncOpenAI, front_ends: FrontEnds) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 2, False
    decode.fail_error = Internal("the engine broke")
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(APIError, match="the engine broke"):
        async for _ in stream:
            pass
