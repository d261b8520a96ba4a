"""The official Python client, unchanged, through router, prefill, hand-off and decode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.support.pair import Brake
from tests.support.router_front_ends import until
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig

CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=256)
TEMPLATE = Path(__file__).parents[2] / "deploy" / "templates" / "chatml_tools.jinja"
HI: list[Any] = [{"role": "user", "content": "hello you"}]
CONTEXT = 2048
#: Whatever the random model says, it says no special token, and so does not end by itself.
PLAIN = {"logit_bias": {"0": -100, "1": -100, "2": -100}}


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    unit: Literal["celsius", "fahrenheit"]


class Clock(BaseModel):
    """The time."""

    zone: Literal["utc", "local"]


TOOLS: list[Any] = [pydantic_function_tool(Weather), pydantic_function_tool(Clock)]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_text(folder)
    save_tiny_llama(folder, vocab_size=512, max_position_embeddings=CONTEXT)
    options: dict[str, Any] = {"prefill_config": CONFIG, "decode_config": CONFIG}
    settings = {"chat_template": str(TEMPLATE), "max_requests": 20}
    async with running_stack(str(folder), router=settings, **options) as stack:
        yield stack
        await stack.pair.idle()
        assert stack.router.num_requests == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{stack.http}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, "seed": 3, "max_completion_tokens": 12, **fields}


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "baton"


async def test_chat_whole_and_streamed_with_usage(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat(n=2, **PLAIN))
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 24
    texts, finishes, usage = {0: "", 1: ""}, {}, None
    stream = await client.chat.completions.create(
        **chat(n=2, **PLAIN, stream=True, stream_options={"include_usage": True})
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert finishes[choice.index] == choice.finish_reason == "length"
    assert usage is not None
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


async def test_completions_whole_streamed_and_in_batches(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "seed": 5, "max_tokens": 20, "temperature": 0.8}
    whole = await client.completions.create(prompt=["hello", "world"], **fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = await client.completions.create(prompt="hello", stream=True, **fields)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    stop = text[6:9]
    cut = await client.completions.create(prompt="hello", stop=[stop], **fields)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text.partition(stop)[0], "stop")
    ids = (await client.completions.create(prompt=[40, 41, 42], echo=True, **fields)).choices[0]
    assert ids.text.startswith("FGH")


async def test_a_seed_repeats_and_another_differs(client: AsyncOpenAI) -> None:
    texts = [
        (await client.chat.completions.create(**chat(seed=seed))).choices[0].message.content
        for seed in (11, 11, 12)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_log_probabilities_in_both_shapes(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(**PLAIN, logprobs=True, top_logprobs=4))
    content = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [4] * 12
    raw = b"".join(bytes(entry.bytes) for entry in content)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    assert all(entry.logprob <= entry.top_logprobs[0].logprob <= 0 for entry in content)
    scored = await client.completions.create(
        model="tiny", prompt="hello world", max_tokens=0, echo=True, logprobs=2
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens) == scored.choices[0].text == "hello world"
    assert len(logprobs.text_offset) == len(logprobs.top_logprobs) == scored.usage.prompt_tokens


async def test_structured_output_and_the_parse_helper(client: AsyncOpenAI) -> None:
    fields = chat(max_completion_tokens=300, temperature=1.0)
    parsed = await client.chat.completions.parse(**fields, response_format=Weather)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    async with client.chat.completions.stream(**fields, response_format=Weather) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    schema = {"name": "yes", "schema": {"enum": ["yes", "no"]}, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    answer = await client.chat.completions.create(**fields, response_format=form)
    assert json.loads(answer.choices[0].message.content) in ("yes", "no")
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            **{**fields, "max_completion_tokens": 3}, response_format=Weather
        )


def check_call(name: str, arguments: str) -> None:
    model = {"Weather": Weather, "Clock": Clock}[name]
    jsonschema.validate(json.loads(arguments), model.model_json_schema())


async def test_one_forced_call_whole_and_streamed(client: AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "Clock"}}
    for choice, parallel in (("required", False), (named, True)):
        fields = chat(tools=TOOLS, tool_choice=choice, max_completion_tokens=200)
        fields["parallel_tool_calls"] = parallel
        whole = (await client.chat.completions.create(**fields)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        (call,) = whole.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        async with client.chat.completions.stream(**fields) as stream:
            done = [e async for e in stream if e.type == "tool_calls.function.arguments.done"]
            final = (await stream.get_final_completion()).choices[0]
        assert [(event.index, event.name) for event in done] == [(0, call.function.name)]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        assert final.message.tool_calls[0].function.parsed_arguments is not None


async def test_parallel_calls_streamed_part_by_part(client: AsyncOpenAI) -> None:
    """The model ends where it may, after its first call; without its end token it makes one after
    the other until it is cut."""
    numbers = []
    for bias in (100, -100):
        fields = chat(tools=TOOLS, tool_choice="required", max_completion_tokens=400, seed=0)
        fields["logit_bias"] = {"2": bias}
        whole = (await client.chat.completions.create(**fields)).choices[0]
        calls: dict[int, list[str]] = {}
        finish = None
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            (choice,) = chunk.choices
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                assert isinstance(delta.index, int)
                if delta.id is not None:
                    assert delta.index == len(calls)
                    calls[delta.index] = [delta.id, delta.function.name, ""]
                calls[delta.index][2] += delta.function.arguments
        assert finish == whole.finish_reason
        assert [call[1:] for call in calls.values()] == [
            [call.function.name, call.function.arguments] for call in whole.message.tool_calls
        ]
        assert len({call[0] for call in calls.values()}) == len(calls)
        numbers.append((finish, len(calls) > 1))
        whole_calls = list(calls.values())[: None if finish == "tool_calls" else -1]
        for _, name, arguments in whole_calls:
            check_call(name, arguments)
    assert numbers == [("tool_calls", False), ("length", True)]


async def test_tools_that_may_be_used_and_results_that_go_back(client: AsyncOpenAI) -> None:
    auto = (await client.chat.completions.create(**chat(**PLAIN, tools=TOOLS))).choices[0]
    assert auto.message.tool_calls is None
    assert auto.finish_reason == "length"
    forced = chat(tools=TOOLS, tool_choice="required", max_completion_tokens=200)
    asked = (await client.chat.completions.create(**forced)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in asked.tool_calls
    ]
    messages = [*HI, asked.model_dump(exclude_none=True), *results]
    after = await client.chat.completions.create(**chat(messages=messages, tools=TOOLS))
    plain = await client.chat.completions.create(**chat(tools=TOOLS, tool_choice="none"))
    told = await client.chat.completions.create(**chat(tools=TOOLS))
    sizes = [answer.usage.prompt_tokens for answer in (plain, told, after)]
    assert sizes == sorted(set(sizes))


async def test_errors_are_the_clients_own_classes(stack: Stack, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**chat(model="other"))
    assert missing.value.code == "model_not_found"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**chat(**fields))
        assert refused.value.param == param
    brake = Brake(stack.pair.decodes[0], 10)
    running = [
        asyncio.create_task(
            client.completions.create(
                model="tiny", prompt="hi", n=10, max_tokens=1500, extra_body={"ignore_eos": True}
            )
        )
        for _ in range(2)
    ]
    await until(lambda: stack.router.num_requests == 20)
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(**chat())
    assert int(full.value.response.headers["retry-after"]) >= 1
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: stack.router.num_requests == 0)
    brake.release()


async def test_timeouts_and_streams_that_are_closed_end_the_work(
    stack: Stack, client: AsyncOpenAI
) -> None:
    long: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 1900}
    endless = {"ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(**long, extra_body=endless, timeout=0.3)
    await until(lambda: stack.router.num_requests == 0)
    with pytest.raises(openai.InternalServerError) as late:
        await client.completions.create(**long, extra_body={**endless, "timeout": 0.3})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    async with await client.completions.create(**long, extra_body=endless, stream=True) as stream:
        async for _ in stream:
            break
    await until(lambda: stack.router.num_requests == 0)
    await stack.pair.idle()
