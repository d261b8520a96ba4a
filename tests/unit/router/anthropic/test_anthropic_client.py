"""The official client, unchanged, over stub workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from protocol.errors import Internal, Overloaded
from protocol.ids import Role
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, until
from tests.support.stub_workers import StubFleet

HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
HI: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Sure. <tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
END = 2


def say(front_ends: FrontEnds, text: str, *, end: bool = True) -> None:
    front_ends.say([*letters(text), *([END] if end else [])])


@pytest.fixture
async def front_ends(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> AsyncIterator[FrontEnds]:
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, chat_template=str(HERMES)) as front_ends:
        yield front_ends


@pytest.fixture
async def client(front_ends: FrontEnds) -> AsyncIterator[AsyncAnthropic]:
    say(front_ends, "Hi 🙂 there")
    async with AsyncAnthropic(base_url=front_ends.url, api_key="none", max_retries=0) as client:
        yield client


def message(**fields: Any) -> Any:
    return {"model": "tiny", "max_tokens": 100, "messages": HI, **fields}


async def test_a_message(client: AsyncAnthropic, front_ends: FrontEnds) -> None:
    answer = await client.messages.create(**message())
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.model_dump() for block in answer.content] == [
        {"type": "text", "text": "Hi 🙂 there", "citations": None}
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    _, tokens = await front_ends.post("/tokenize", {"messages": HI})
    assert answer.usage.input_tokens == tokens["count"]
    assert answer.usage.output_tokens == len(letters("Hi 🙂 there")) + 1
    assert answer._request_id


async def test_what_was_cached_is_counted_apart(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    for worker in front_ends.fleet.workers:
        worker.cached_tokens = 3
    whole = await client.messages.create(**message())
    assert whole.usage.cache_read_input_tokens == 3
    _, tokens = await front_ends.post("/tokenize", {"messages": HI})
    assert whole.usage.input_tokens == tokens["count"] - 3
    async with client.messages.stream(**message()) as stream:
        streamed = await stream.get_final_message()
    assert streamed.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)


async def test_events(client: AsyncAnthropic) -> None:
    stream = await client.messages.create(**message(max_tokens=7), stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == "Hi 🙂"
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 7


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_sequence_is_named(client: AsyncAnthropic, streamed: bool) -> None:
    fields = message(stop_sequences=["zz", " there"])
    if streamed:
        async with client.messages.stream(**fields) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await client.messages.create(**fields)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " there")
    assert answer.content[0].text == "Hi 🙂"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_used_and_its_result_read(
    client: AsyncAnthropic, front_ends: FrontEnds, streamed: bool
) -> None:
    say(front_ends, CALL)
    fields = message(tools=[WEATHER])
    if streamed:
        async with client.messages.stream(**fields) as stream:
            events = [event.type async for event in stream]
            answer = await stream.get_final_message()
        assert events.count("content_block_stop") == 2
        assert "input_json" in events
    else:
        answer = await client.messages.create(**fields)
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.text == "Sure."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Bergen"})
    say(front_ends, "Rain.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*HI, {"role": "assistant", "content": answer.content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
    again = await client.messages.create(**message(messages=turns, tools=[WEATHER]))
    assert again.content[0].text == "Rain."
    function = {"name": "weather", "arguments": json.dumps(call.input)}
    as_chat = [
        *HI,
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        {"role": "user", "content": "so?"},
    ]
    tool = {"type": "function", "function": {"name": "weather"}}
    tool["function"]["description"] = WEATHER["description"]
    tool["function"]["parameters"] = WEATHER["input_schema"]
    _, tokens = await front_ends.post("/tokenize", {"messages": as_chat, "tools": [tool]})
    assert again.usage.input_tokens == tokens["count"]
    count = await client.messages.count_tokens(model="tiny", messages=turns, tools=[WEATHER])
    assert count.input_tokens == tokens["count"]


async def test_a_call_that_is_cut_short_has_no_input(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    say(front_ends, CALL)
    cut = message(tools=[WEATHER], max_tokens=len(CALL) - 20)
    answer = await client.messages.create(**cut)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[1].input == {}


@pytest.mark.parametrize("city", ["NaN", "1e999", '"\\ud800"'])
async def test_arguments_that_no_answer_can_hold_are_no_input(
    client: AsyncAnthropic, front_ends: FrontEnds, city: str
) -> None:
    say(front_ends, CALL.replace('"Bergen"', city))
    answer = await client.messages.create(**message(tools=[WEATHER]))
    assert answer.stop_reason == "tool_use"
    assert answer.content[1].input == {}


def prompt_of(front_ends: FrontEnds) -> str:
    (prompt,) = {
        submit.prompt_ids for worker in front_ends.fleet.workers for submit in worker.submitted
    }
    return front_ends.router._model.text.decode(prompt, skip_special_tokens=False)


async def test_system_and_prefill(client: AsyncAnthropic, front_ends: FrontEnds) -> None:
    await client.messages.create(
        **message(
            system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
            messages=[*HI, {"role": "assistant", "content": "I say"}],
        )
    )
    assert prompt_of(front_ends) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nI say"
    )


async def test_sampling_fields_reach_the_worker(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    await client.messages.create(
        **message(), extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11}
    )
    sampling = front_ends.fleet.workers[-1].submitted[0].sampling
    found = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    assert found == (0.5, 0.25, 7, 11)


async def test_a_limit_beyond_the_context_is_cut_to_what_fits(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    say(front_ends, "a" * 600)
    answer = await client.messages.create(**message(max_tokens=32_000), stream=False, timeout=60)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == 512


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": []}, "messages"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"stop": ["a"]}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "schema"),
]


async def test_what_is_wrong_is_named(client: AsyncAnthropic) -> None:
    for fields, param in WRONG:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**message(), extra_body=fields)
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"].endswith(param), fields
        assert body["error"]["param"].partition(".schema")[0] in body["error"]["message"]
        assert body["request_id"] == caught.value.request_id


async def test_errors_are_the_clients_own_classes(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**message(model="other"))
    for worker in front_ends.fleet.workers:
        worker.refuse = Overloaded("full", retry_after_s=2)
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(**message())
    assert full.value.response.headers["retry-after"] == "2"


async def test_a_failure_in_mid_stream_raises(
    client: AsyncAnthropic, front_ends: FrontEnds
) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 2, False
    decode.fail_error = Internal("the engine broke")
    with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
        async with client.messages.stream(**message()) as stream:
            async for _ in stream:
                pass


async def test_a_closed_stream_is_cancelled(client: AsyncAnthropic, front_ends: FrontEnds) -> None:
    for worker in front_ends.fleet.workers:
        worker.script, worker.delay_s = (lambda s: letters("a" * 100)), 0.05
    async with client.messages.stream(**message()) as stream:
        async for _ in stream.text_stream:
            break
    await until(lambda: front_ends.router.num_requests == 0)
    await until(lambda: any(worker.cancelled for worker in front_ends.fleet.workers))


async def test_models(client: AsyncAnthropic) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert (await client.models.retrieve("tiny")).created_at == model.created_at


async def test_extra_fields_of_agents_pass(client: AsyncAnthropic, front_ends: FrontEnds) -> None:
    """The shape of what coding agents send."""
    block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    raw = await client.messages.with_raw_response.create(
        **message(
            messages=[
                {"role": "user", "content": [block]},
                {
                    "role": "assistant",
                    "content": [thought, {"type": "redacted_thinking", "data": "x"}, block],
                },
                {"role": "user", "content": [block, block]},
            ],
            metadata={"user_id": "u"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            service_tier="auto",
            tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}, "strict": True}],
        ),
        extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}},
        extra_query={"beta": "true"},
    )
    assert (await raw.parse()).content[0].text == "Hi 🙂 there"
    assert raw.headers["baton-ignored-fields"] == "metadata, context_management"


async def test_the_key_may_come_in_either_header(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    from router.auth.keys import hashed, new_key

    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- name: ann\n  hash: '{hashed(key)}'\n  requests_per_minute: 2\n")
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, api_keys_file=str(file)) as front_ends:
        say(front_ends, "Hi")
        for given in ({"api_key": key}, {"auth_token": key}):
            async with AsyncAnthropic(base_url=front_ends.url, max_retries=0, **given) as client:
                raw = await client.messages.with_raw_response.create(**message())
                assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        async with AsyncAnthropic(base_url=front_ends.url, max_retries=0, api_key=key) as client:
            with pytest.raises(anthropic.RateLimitError) as full:
                await client.messages.create(**message())
            assert full.value.response.headers["x-ratelimit-remaining-requests"] == "0"
            assert 0 < float(full.value.response.headers["x-ratelimit-reset-requests"][:-1]) <= 60
        async with AsyncAnthropic(base_url=front_ends.url, max_retries=0, api_key="no") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**message())
            assert caught.value.body["error"]["type"] == "authentication_error"
