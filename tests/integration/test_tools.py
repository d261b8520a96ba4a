"""Forced tool calls of the real model, from both front ends through both workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from protocol.wire import inference_pb2 as wire
from tests.support import services
from tests.support.stack import Stack, running_stack
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import FINISHED

CONFIG = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=256)
TEMPLATE = Path(__file__).parents[2] / "deploy" / "templates" / "chatml_tools.jinja"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(smollm2: Path) -> AsyncIterator[Stack]:
    async with running_stack(
        str(smollm2),
        router={"chat_template": str(TEMPLATE)},
        prefill_config=CONFIG,
        decode_config=CONFIG,
    ) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none") as client:
        yield client


def check(name: str, arguments: str) -> None:
    schema: dict[str, Any] = {"weather": SCHEMA, "clock": {"maxProperties": 0}}[name]
    jsonschema.validate(json.loads(arguments), schema)


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_a_required_call_follows_its_schema_streamed_and_whole(
    stack: Stack, client: AsyncOpenAI
) -> None:
    async def ask(temperature: float) -> None:
        fields: dict[str, Any] = {
            "model": "tiny",
            "messages": ASK,
            "tools": [WEATHER, CLOCK],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": temperature,
            "seed": 7,
            "max_tokens": 120,
        }
        whole = (await client.chat.completions.create(**fields)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        check(call.function.name, call.function.arguments)
        async with client.chat.completions.stream(**fields) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )

    await asyncio.gather(ask(0.0), ask(1.0))
    await stack.pair.idle()
    assert stack.pair.prefills[0].status().counters[FINISHED] >= 4


async def test_a_result_goes_back_and_a_named_call_comes_over_grpc(
    stack: Stack, client: AsyncOpenAI
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    talk = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    answer = await client.chat.completions.create(
        model="tiny", messages=talk, tools=[WEATHER, CLOCK], tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.tool_calls is None
    request = wire.GenerateRequest(
        chat=wire.Chat(messages=[wire.Message(role="user", content="Weather in Oslo?")]),
        tools=[wire.Tool(name="weather", parameters=json.dumps(SCHEMA)), wire.Tool(name="clock")],
        tool_choice=wire.ToolChoice(function="weather"),
        temperature=0.0,
        max_tokens=100,
    )
    names, arguments, finish = [], "", ""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        async for message in services.InferenceStub(channel).Generate(request, timeout=120):
            for choice in message.choices:
                assert choice.text == ""
                finish = choice.finish_reason or finish
                for delta in choice.tool_calls:
                    assert delta.index == 0
                    names += [delta.name] if delta.HasField("name") else []
                    arguments += delta.arguments
    assert (names, finish) == (["weather"], "tool_calls")
    check("weather", arguments)
    await stack.pair.idle()
