"""Log-probabilities and echo on both front ends: shapes, places, streams, resumption."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.offload import encode, encode_in_pieces
from tests.support.router_front_ends import (
    FrontEnds,
    MakeFrontEnds,
    letters,
    open_front_ends,
    until,
)
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import write_model_text
from tests.support.wire_requests import to_message

TEXT = "Hi 🙂 there, friend"
MESSAGES = [{"role": "user", "content": "hello"}]
HELLO = letters("hello")


@pytest.fixture
async def client(front_ends: FrontEnds) -> AsyncIterator[AsyncOpenAI]:
    say(front_ends, TEXT)
    async with AsyncOpenAI(
        base_url=front_ends.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def say(front_ends: FrontEnds, text: str) -> None:
    front_ends.say(letters(text))


async def events(front_ends: FrontEnds, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with front_ends.http.post(
        front_ends.url + path, json=body | {"stream": True}
    ) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


async def grpc_choices(front_ends: FrontEnds, **fields: object) -> list[pb.Choice]:
    messages = [m async for m in front_ends.inference.Generate(to_message(fields))]
    return [choice for message in messages for choice in message.choices]


async def test_chat_has_the_shape_of_the_official_client(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=7, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "Hi 🙂"
    assert [entry.token for entry in content[:4]] == ["H", "i", " ", "bytes:\\xf0"]
    assert {entry.logprob for entry in content} == {-0.75}
    assert [[top.logprob for top in e.top_logprobs] for e in content] == [[-0.5, -0.75, -1.0]] * 7
    assert content[0].top_logprobs[1].token == "H"


async def test_completions_have_the_shape_of_the_official_client(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="x", max_tokens=9, logprobs=1)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "Hi 🙂 t"
    assert found.tokens[:3] == ["H", "i", " "]
    assert found.token_logprobs == [-0.75] * 9
    assert found.top_logprobs[0] == {"I": -0.5, "H": -0.75}, "the token itself is always there"
    assert found.text_offset == [0, 1, 2, 3, 3, 3, 3, 4, 5], "four bytes make one character"
    bare = await client.completions.create(model="tiny", prompt="x", max_tokens=1, logprobs=0)
    assert bare.choices[0].logprobs.top_logprobs == [{"H": -0.75}]
    none = await client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert none.choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, ["🙂 th"], [", frog", "riend"], ["zzz"]])
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_stream_has_the_entries_of_the_whole_answer_and_each_with_its_text(
    front_ends: FrontEnds, kind: str, stop: list[str] | None
) -> None:
    say(front_ends, TEXT)
    chat = kind == "chat"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "hello", "echo": True}
    body |= {"max_tokens": len(letters(TEXT)), "logprobs": True, "top_logprobs": 2, "stop": stop}
    status, whole = await front_ends.post(path, body)
    assert status == 200
    choice = whole["choices"][0]
    parts = [event["choices"][0] for event in await events(front_ends, path, body)]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    text = choice["message"]["content"] if chat else choice["text"]
    shown = "".join(p["delta"]["content"] if chat else p["text"] for p in parts)
    assert shown == text
    for name, entries in choice["logprobs"].items():
        assert [entry for part in logprobs for entry in part[name] or ()] == (entries or [])
    made = whole["usage"]["completion_tokens"]
    entries = choice["logprobs"]["content" if chat else "tokens"]
    assert len(entries) == made + (0 if chat else whole["usage"]["prompt_tokens"])
    if chat:
        data = bytes(byte for entry in entries for byte in entry["bytes"])
        assert data.decode().startswith(text)
    else:
        for offset, token in zip(choice["logprobs"]["text_offset"], entries, strict=True):
            if not token.startswith("bytes:"):
                assert (text + TEXT)[offset:].startswith(token) or offset >= len(text)


async def test_text_that_is_held_back_keeps_its_entries(front_ends: FrontEnds) -> None:
    say(front_ends, "ab stop me")
    body = {"prompt": "x", "max_tokens": 10, "logprobs": 0, "stop": "stop!"}
    parts = [e["choices"][0] for e in await events(front_ends, "/v1/completions", body)]
    assert [p["text"] for p in parts] == ["a", "b", " ", "stop ", "m", "e"]
    assert [p["logprobs"]["tokens"] for p in parts] == [
        ["a"], ["b"], [" "], ["s", "t", "o", "p", " "], ["m"], ["e"],
    ]  # fmt: skip
    assert parts[3]["logprobs"]["text_offset"] == [3, 4, 5, 6, 7]


async def test_tokens_behind_bytes_that_become_no_character_have_their_place(
    front_ends: FrontEnds,
) -> None:
    half = letters("🙂")[:2]
    front_ends.say([*letters("a"), *half, *letters("bc"), half[0], *letters("d")])
    body = {"prompt": [*half, *HELLO], "max_tokens": 7, "logprobs": 0, "echo": True}
    _, whole = await front_ends.post("/v1/completions", body)
    (choice,) = whole["choices"]
    assert choice["text"] == "\ufffdhelloa\ufffdbc\ufffdd"
    found = choice["logprobs"]
    assert found["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset] == token


async def test_scoring_as_evaluation_tools_do_it(front_ends: FrontEnds) -> None:
    body = {"prompt": ["hello", HELLO], "max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = await front_ends.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 0
    text, ids = answer["choices"]
    assert text["text"] == ids["text"] == "hello"
    assert text["finish_reason"] == "length"
    found = ids["logprobs"]
    assert found["tokens"] == list("hello")
    assert found["token_logprobs"] == [None, -0.75, -0.75, -0.75, -0.75]
    assert found["top_logprobs"][:2] == [None, {"f": -0.5, "e": -0.75}]
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    prefill, decode = front_ends.fleet.workers
    submit = (prefill.submitted + decode.submitted)[-1]
    assert (submit.sampling.max_tokens, submit.sampling.prompt_logprobs) == (0, 1)
    assert submit.bypass_prefix_cache
    await until(lambda: not prefill.running and not decode.running)


async def test_prompt_logprobs_in_the_form_of_vllm(front_ends: FrontEnds) -> None:
    body = {"prompt": HELLO, "prompt_logprobs": 1, "max_tokens": 2, "n": 2}
    status, answer = await front_ends.post("/v1/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        found = choice["prompt_logprobs"]
        assert found[0] is None
        first = {"logprob": -0.5, "rank": 1, "decoded_token": "f"}
        own = {"logprob": -0.75, "rank": 2, "decoded_token": "e"}
        assert found[1] == {str(HELLO[1] + 1): first, str(HELLO[1]): own}
        assert choice["logprobs"] is None
    chat = {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1, "n": 2}
    status, answer = await front_ends.post("/v1/chat/completions", chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]
    streamed = await events(front_ends, "/v1/chat/completions", chat)
    assert [e["prompt_logprobs"] for e in streamed if "prompt_logprobs" in e] == [
        answer["prompt_logprobs"]
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_grpc_has_the_same_entries(front_ends: FrontEnds, stream: bool) -> None:
    say(front_ends, TEXT)
    fields = {"prompt": "hello", "echo": True, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    _, answer = await front_ends.post("/v1/completions", fields)
    want = answer["choices"][0]
    choices = await grpc_choices(front_ends, **fields, stream=stream, prompt_logprobs=1)
    entries = [entry for choice in choices for entry in choice.logprobs]
    assert "".join(choice.text for choice in choices) == want["text"]
    assert [e.token for e in entries] == want["logprobs"]["tokens"]
    assert [e.text_offset for e in entries] == want["logprobs"]["text_offset"]
    logprobs = [e.logprob if e.HasField("logprob") else None for e in entries]
    assert logprobs == want["logprobs"]["token_logprobs"]
    for entry, top in zip(entries, want["logprobs"]["top_logprobs"], strict=True):
        assert {t.token: t.logprob for t in entry.top} == (top or {})
    prompt = [e for choice in choices for e in choice.prompt_logprobs]
    assert b"".join(e.bytes for e in prompt) == b"hello"
    assert [len(e.top) for e in prompt] == [0] + [1] * (len(prompt) - 1)
    assert all(e.rank == 2 for e in prompt[1:])


async def test_a_resumed_request_neither_loses_nor_repeats_an_entry(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.PREFILL)
    decodes = [await fleet.add(Role.DECODE, delay_s=0.02) for _ in range(2)]
    async with make_front_ends(fleet) as front_ends:
        say(front_ends, "abcdefghij")
        body = {"prompt": "hello you", "max_tokens": 10, "logprobs": 1, "prompt_logprobs": 0}
        asked = asyncio.create_task(front_ends.post("/v1/completions", body))
        await until(lambda: any(worker.submitted for worker in decodes))
        next(worker for worker in decodes if worker.submitted).fail_after = 4
        _, answer = await asked
        choice = answer["choices"][0]
        assert choice["logprobs"]["tokens"] == list("abcdefghij")
        assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        again = [s for w in fleet.workers for s in w.submitted if s.output_ids]
        assert again
        assert {s.sampling.prompt_logprobs for s in again} == {None}, "it was scored before"


async def test_a_prompt_half_scored_is_scored_again_from_the_start(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    workers = [await fleet.add(Role.DECODE, scores_before_death=True) for _ in range(2)]
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": HELLO * 4, "max_tokens": 0, "echo": True, "logprobs": 2}
        _, answer = await front_ends.post("/v1/completions", body)
        assert [len(worker.submitted) for worker in workers] == [1, 1]
        assert answer["choices"][0]["logprobs"]["tokens"] == list("hello" * 4)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-0.75] * 19


async def test_special_tokens_and_stop_strings_can_be_kept(front_ends: FrontEnds) -> None:
    front_ends.say([*letters("hi"), 1, *letters(" you"), 2])
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 9}

    async def text(**more: object) -> str:
        status, answer = await front_ends.post("/v1/completions", body | more)
        assert status == 200, answer
        (whole,) = await grpc_choices(front_ends, **(body | more))
        assert whole.text == answer["choices"][0]["text"]
        return answer["choices"][0]["text"]

    assert await text() == "hi you"
    assert await text(skip_special_tokens=False) == "hi<|im_start|> you"
    kept = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert await text(**kept) == "hi<|im_start|> you<|im_end|>"
    assert await text(stop=" y") == "hi"
    assert await text(stop=" y", include_stop_str_in_output=True) == "hi y"
    assert await text(echo=True) == "xhi you"
    status, answer = await front_ends.post(
        "/v1/completions", {"prompt": [1, *letters("9")], "max_tokens": 0, "echo": True}
    )
    assert (status, answer["choices"][0]["text"]) == (200, "9")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON_VALUES, st.sampled_from([1, 300]))
def test_a_large_answer_is_the_same_in_pieces(value: object, times: int) -> None:
    answer = {"choices": [{"logprobs": [value] * times, "x": value}]}
    assert encode_in_pieces(answer) == encode(answer)


async def test_a_large_answer_is_whole_and_a_larger_one_refused(
    fleet: StubFleet, tmp_path: Path
) -> None:
    await fleet.add(Role.DECODE, num_blocks=4096, max_model_len=32768)
    async with open_front_ends(fleet, write_model_text(tmp_path, context=32768)) as front_ends:
        ids = [30 + i % 200 for i in range(12_000)]
        body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 20}
        status, answer = await front_ends.post("/v1/completions", body)
        assert status == 200, answer
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == 12_000
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"][-1]) == 20
        status, answer = await front_ends.post("/v1/completions", body | {"n": 2})
        assert (status, answer["error"]["param"]) == (400, "echo")
