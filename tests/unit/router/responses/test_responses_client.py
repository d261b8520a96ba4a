"""The official client's responses, unchanged, over stub workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from protocol.errors import Internal, Overloaded
from protocol.ids import Role
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, until
from tests.support.stub_workers import StubFleet
from tests.unit.router.dispatch.test_outcomes import failures

HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = 'Sure. <tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
END = 2


def say(front_ends: FrontEnds, text: str) -> None:
    front_ends.say([*letters(text), END])


@pytest.fixture
async def front_ends(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> AsyncIterator[FrontEnds]:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, chat_template=str(HERMES)) as front_ends:
        yield front_ends


@pytest.fixture
async def client(front_ends: FrontEnds) -> AsyncIterator[AsyncOpenAI]:
    say(front_ends, "Hi 🙂 there")
    async with AsyncOpenAI(
        base_url=front_ends.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def asked(**fields: Any) -> Any:
    return {"model": "tiny", "input": "hello", **fields}


def prompts(front_ends: FrontEnds) -> list[str]:
    """The prompts that decode was given, as text."""
    (decode,) = [worker for worker in front_ends.fleet.workers if worker.role is Role.DECODE]
    text = front_ends.router._model.text
    return [text.decode(s.prompt_ids, skip_special_tokens=False) for s in decode.submitted]


async def test_a_response(client: AsyncOpenAI, front_ends: FrontEnds) -> None:
    response = await client.responses.create(
        **asked(instructions="Be short.", metadata={"a": "b"}, max_output_tokens=100)
    )
    assert (response.status, response.output_text) == ("completed", "Hi 🙂 there")
    assert (response.instructions, response.metadata) == ("Be short.", {"a": "b"})
    assert prompts(front_ends) == [
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}]
    _, tokens = await front_ends.post("/tokenize", {"messages": chat})
    usage = response.usage
    assert usage.input_tokens == tokens["count"]
    assert usage.output_tokens == len(letters("Hi 🙂 there")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    count = await client.responses.input_tokens.count(input="hello", instructions="Be short.")
    assert count.input_tokens == tokens["count"]


async def test_events_build_the_same_response(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**asked())
    stream = await client.responses.create(**asked(), stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == "Hi 🙂 there"
    ids = {"id", "created_at", "output"}
    assert events[-1].response.model_dump(exclude=ids) == whole.model_dump(exclude=ids)
    assert events[-1].response.output_text == whole.output_text


async def test_an_output_that_is_cut_is_incomplete(client: AsyncOpenAI) -> None:
    async with client.responses.stream(**asked(max_output_tokens=7)) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.incomplete"
    whole = await client.responses.create(**asked(max_output_tokens=7))
    assert (whole.status, whole.output_text) == ("incomplete", "Hi 🙂")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_a_function_is_called_and_its_result_read(
    client: AsyncOpenAI, front_ends: FrontEnds, streamed: bool, stored: bool
) -> None:
    say(front_ends, CALL)
    fields = asked(tools=[WEATHER], store=stored)
    if streamed:
        async with client.responses.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
    else:
        response = await client.responses.create(**fields)
    message, call = response.output
    assert message.content[0].text == "Sure."
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "weather",
        '{"city": "Bergen"}',
    )
    say(front_ends, "Rain.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    if stored:
        again = {"previous_response_id": response.id, "input": [result]}
    else:
        before = [{"role": "user", "content": "hello"}, *response.output]
        again = {"input": [*before, result]}
    final = await client.responses.create(**asked() | again, tools=[WEATHER])
    assert final.output_text == "Rain."
    first, second = prompts(front_ends)[-2:]
    assert second.startswith(first)
    said = second.removeprefix(first)
    assert said.startswith("Sure.\n<tool_call>")
    assert json.loads(said.split("<tool_call>")[1].split("</tool_call>")[0]) == {
        "name": "weather",
        "arguments": {"city": "Bergen"},
    }
    assert "rain" in said


async def test_a_conversation_by_ids(client: AsyncOpenAI, front_ends: FrontEnds) -> None:
    first = await client.responses.create(**asked(instructions="Be short."))
    second = await client.responses.create(**asked(input="again", previous_response_id=first.id))
    assert prompts(front_ends)[-1] == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nHi 🙂 there<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )  # instructions hold for one response
    assert second.previous_response_id == first.id
    read = await client.responses.retrieve(second.id)
    assert read.model_dump() == second.model_dump()
    items = await client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["again"]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**asked(previous_response_id=first.id))
    assert caught.value.param == "previous_response_id"
    await client.responses.create(**asked(previous_response_id=second.id))  # whole by itself


async def test_instructions_and_first_messages_of_developers_are_one_message(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    items: Any = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "Now."},
    ]
    await client.responses.create(model="tiny", instructions="Be short.", input=items)
    assert prompts(front_ends) == [
        "<|im_start|>system\nBe short.\n\nUse tools.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nNow.<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]


async def test_what_is_not_to_be_stored_is_not(client: AsyncOpenAI) -> None:
    response = await client.responses.create(**asked(store=False))
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_in_the_background(client: AsyncOpenAI, front_ends: FrontEnds) -> None:
    response = await client.responses.create(**asked(background=True))
    assert response.status == "queued"
    async with asyncio.timeout(60):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", "Hi 🙂 there")
    assert (await client.responses.cancel(response.id)).status == "completed"
    for worker in front_ends.fleet.workers:
        worker.gate = asyncio.Event()  # which stays closed
    slow = await client.responses.create(**asked(background=True))
    await until(lambda: front_ends.router.num_requests == 1)
    with pytest.raises(openai.BadRequestError, match=r"is (queued|in_progress)"):
        await client.responses.create(**asked(previous_response_id=slow.id))
    cancelled = await client.responses.cancel(slow.id)
    assert cancelled.status == "cancelled"
    await until(lambda: front_ends.router.num_requests == 0)
    for worker in front_ends.fleet.workers:
        worker.refuse = Overloaded("full")
    failed = await client.responses.create(**asked(background=True))
    async with asyncio.timeout(60):
        while failed.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            failed = await client.responses.retrieve(failed.id)
    assert (failed.status, failed.error.code) == ("failed", "rate_limit_exceeded")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel((await _refusable(client, front_ends)).id)
    assert failures(front_ends, "http") == {"cancelled": 1, "invalid_request": 1, "overloaded": 1}


async def test_a_fault_in_the_background_is_logged(
    client: AsyncOpenAI, front_ends: FrontEnds, caplog: pytest.LogCaptureFixture
) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 2, False
    decode.fail_error = Internal("the engine broke")
    caplog.set_level("ERROR", logger="baton")
    response = await client.responses.create(**asked(background=True))
    await until(lambda: failures(front_ends, "http") == {"internal": 1})
    (record,) = (record for record in caplog.records if record.message == "request failed")
    assert record.__dict__["request"] == response.id


async def _refusable(client: AsyncOpenAI, front_ends: FrontEnds) -> Any:
    for worker in front_ends.fleet.workers:
        worker.refuse, worker.gate = None, None
    return await client.responses.create(**asked())


async def test_a_router_that_retires_waits_for_the_background(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    gate = asyncio.Event()
    for worker in front_ends.fleet.workers:
        worker.gate = gate
    await client.responses.create(**asked(background=True))
    await until(lambda: front_ends.router.num_requests == 1)
    retiring = asyncio.create_task(front_ends.router.retire(60))
    await asyncio.sleep(0.02)
    assert not retiring.done()
    gate.set()
    assert await retiring
    assert front_ends.router.num_requests == 0


class Name(BaseModel):
    name: str


async def test_structured_output_is_parsed(client: AsyncOpenAI, front_ends: FrontEnds) -> None:
    say(front_ends, '{"name": "Ann"}')
    response = await client.responses.parse(**asked(), text_format=Name)
    assert response.output_parsed == Name(name="Ann")
    grammar = front_ends.fleet.workers[-1].submitted[0].grammar
    assert json.loads(grammar.source)["properties"]["name"]["type"] == "string"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    ({"input": []}, "input"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True, "stream": True}, "stream"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"n": 2}, "n"),
    ({"stop": ["a"]}, "stop"),
    ({"max_tokens": 4}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"guided_regex": "a"}, "guided_regex"),
]


async def test_sampling_fields_of_chat_are_served_and_neutral_ones_named(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    sampling = {"top_k": 3, "min_p": 0.1, "presence_penalty": 1.0, "logit_bias": {"5": -1.0}}
    raw = await client.responses.with_raw_response.create(
        **asked(),
        extra_body={**sampling, "n": 1, "stop": [], "user": "u", "skip_special_tokens": True},
    )
    assert raw.headers["baton-ignored-fields"] == "n, stop, skip_special_tokens"
    sent = front_ends.fleet.workers[-1].submitted[-1].sampling
    assert (sent.top_k, sent.min_p, sent.presence_penalty) == (3, 0.1, 1.0)
    assert sent.logit_bias == ((5, -1.0),)


async def test_what_is_wrong_is_named(client: AsyncOpenAI) -> None:
    for fields, param in WRONG:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked(), extra_body=fields)
        assert (caught.value.param or "").endswith(param), fields
        assert param in caught.value.message, fields


async def test_a_failure_in_mid_stream_is_an_event(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 2, False
    decode.fail_error = Internal("the engine broke")
    stream = await client.responses.create(**asked(), stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == (
        "failed",
        "the engine broke",
    )
    assert events[-1].sequence_number == len(events) - 1
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[-1].response.id)


async def test_the_shape_of_a_coding_agents_session(
    client: AsyncOpenAI, front_ends: FrontEnds
) -> None:
    """Everything in the input, nothing stored, tools of several kinds, thoughts sent back."""
    part = {"type": "input_text", "text": "x"}
    items = [
        {"type": "message", "role": "user", "content": [part]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"type": "function_call_output", "call_id": "c2", "output": [part]},
    ]
    raw = await client.responses.with_raw_response.create(
        model="tiny",
        input=items,
        instructions="Go.",
        tools=[WEATHER, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert raw.parse().output_text == "Hi 🙂 there"
    assert raw.headers["baton-ignored-fields"] == (
        "prompt_cache_key, client_metadata, tools[].web_search"
    )


async def test_callers_do_not_see_each_others_responses(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    from router.auth.keys import hashed, new_key

    keys, file = [new_key(), new_key()], tmp_path / "keys.yaml"
    file.write_text(
        "keys:\n" + "".join(f"- name: k{i}\n  hash: '{hashed(k)}'\n" for i, k in enumerate(keys))
    )
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, api_keys_file=str(file)) as front_ends:
        say(front_ends, "Hi")
        url = front_ends.url + "/v1"
        async with (
            AsyncOpenAI(base_url=url, api_key=keys[0], max_retries=0) as ann,
            AsyncOpenAI(base_url=url, api_key=keys[1], max_retries=0) as bob,
        ):
            response = await ann.responses.create(**asked())
            for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(response.id)
            with pytest.raises(openai.BadRequestError):
                await bob.responses.create(**asked(previous_response_id=response.id))
            assert (await ann.responses.retrieve(response.id)).output_text == "Hi"
