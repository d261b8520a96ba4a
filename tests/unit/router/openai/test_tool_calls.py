"""Tool calls on both front ends, with the official client, over scripted workers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from pydantic import BaseModel

from grammar.compiler import Compiler
from grammar.matcher import compute_masks
from grammar.vocabulary import byte_vocabulary, load_vocabulary
from protocol.errors import InvalidRequest
from protocol.ids import Role
from protocol.sampling import Grammar, GrammarKind
from protocol.wire import inference_pb2 as pb
from router.text.tool_formats import ToolFormat
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import CHATML, byte_level, write_model_text

HERMES = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "clock"}}
TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bodø 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def say(front_ends: FrontEnds, text: str, end: int = 2) -> None:
    for worker in front_ends.fleet.workers:
        worker.script = lambda _submit: [*letters(text), end]


@pytest.fixture
async def tooled(fleet: StubFleet, tmp_path: Path) -> AsyncIterator[FrontEnds]:
    """FrontEnds of a model with a template for tools."""

    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    folder = write_model_text(tmp_path / "tiny", context=4000)
    async with open_front_ends(fleet, folder, chat_template=str(HERMES)) as front_ends:
        yield front_ends


@pytest.fixture
async def client(tooled: FrontEnds) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=tooled.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_calls_of_a_whole_answer(tooled: FrontEnds, client: AsyncOpenAI) -> None:
    say(tooled, TWO_CALLS)
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, tools=[WEATHER, CLOCK], n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        first, second = choice.message.tool_calls
        assert (first.function.name, second.function.name) == ("weather", "clock")
        assert json.loads(first.function.arguments) == {"city": "Bodø 🙂"}
        assert second.function.arguments == "{}"
        assert first.id != second.id
    prompt = tooled.fleet.workers[0].submitted[0]
    assert prompt.grammar is None  # the model may do as it likes
    assert prompt.keep_s == 300.0  # it will return with the results of the calls


async def test_calls_of_a_stream(tooled: FrontEnds, client: AsyncOpenAI) -> None:
    say(tooled, TWO_CALLS)
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, tools=[WEATHER, CLOCK], stream=True
    )
    ids: dict[int, list[str]] = {}
    arguments: dict[int, list[str]] = {}
    text, finish = "", None
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert isinstance(call.index, int)
            if call.id:
                ids.setdefault(call.index, []).append(call.id)
                assert call.function.name == ("weather", "clock")[call.index]
            arguments.setdefault(call.index, []).append(call.function.arguments)
    assert (text, finish) == ("I look.", "tool_calls")
    assert [len(found) for found in ids.values()] == [1, 1]
    assert len(arguments[0]) > 10  # piece by piece
    assert json.loads("".join(arguments[0])) == {"city": "Bodø 🙂"}
    assert json.loads("".join(arguments[1])) == {}


class Weather(BaseModel):
    """The weather of a city."""

    city: str


async def test_the_official_clients_helpers(tooled: FrontEnds, client: AsyncOpenAI) -> None:
    say(tooled, '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [pydantic_function_tool(Weather)],
    }
    parsed = await client.chat.completions.parse(**fields)
    call = parsed.choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == Weather(city="Oslo")
    assert parsed.choices[0].message.content is None
    async with client.chat.completions.stream(**fields) as stream:
        done = [e async for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert [event.name for event in done] == ["Weather"]
    choice = final.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")


async def test_a_conversation_goes_on_with_results(tooled: FrontEnds, client: AsyncOpenAI) -> None:
    say(tooled, TWO_CALLS)
    first = await client.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER, CLOCK])
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
        for i, call in enumerate(message.tool_calls)
    ]
    say(tooled, "All is well.")
    second = await client.chat.completions.create(
        model="tiny", messages=[*HI, message, *results], tools=[WEATHER, CLOCK]
    )
    assert second.choices[0].message.content == "All is well."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


async def test_a_forced_call_comes_with_a_grammar(tooled: FrontEnds) -> None:
    say(tooled, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for fields, names, several, answer in [
        ({"tool_choice": "required"}, ["weather", "clock"], True, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "clock"], False, 0),
        ({"tool_choice": NAMED}, ["clock"], False, False),
        ({"response_format": schema}, ["weather", "clock"], True, True),
        ({"tool_choice": "required", "response_format": schema}, ["weather", "clock"], True, False),
    ]:
        body = {"messages": HI, "tools": [WEATHER, CLOCK], **fields}
        status, answered = await tooled.post("/v1/chat/completions", body)
        assert status == 200, answered
        assert answered["choices"][0]["finish_reason"] == "tool_calls"
        grammar = tooled.fleet.workers[1].submitted[-1].grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK
        for name in ("weather", "clock"):
            assert (f'"name\\": \\"" "{name}"' in grammar.source) == (name in names)
        assert (")*" in grammar.source) == several
        assert ("answer:" in grammar.source) == bool(answer)


async def test_without_tools_or_with_none_of_them_text_is_text(tooled: FrontEnds) -> None:
    say(tooled, TWO_CALLS)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        body = {"messages": HI, **fields}
        _, answer = await tooled.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")
        assert "tool_calls" not in choice["message"]
    prompts = {submit.prompt_ids for submit in tooled.fleet.workers[1].submitted}
    assert len(prompts) == 1  # the model is not told of tools that it must not use


async def test_a_call_that_is_cut_short_says_so(tooled: FrontEnds) -> None:
    say(tooled, TWO_CALLS)
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": 70}
    _, answer = await tooled.post("/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


async def test_a_stop_string_inside_a_call_leaves_no_call_to_run(tooled: FrontEnds) -> None:
    say(tooled, TWO_CALLS)
    for stop, finish, arguments in (
        ("Bod", "stop", ['{"city": "']),
        ("\n</tool_call>", "tool_calls", ['{"city": "Bodø 🙂"}']),
    ):
        body = {"messages": HI, "tools": [WEATHER, CLOCK], "stop": stop, "max_tokens": 400}
        _, answer = await tooled.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        calls = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], [c["function"]["arguments"] for c in calls]) == (
            finish,
            arguments,
        )


def grpc_request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]),
        tools=[pb.Tool(name="weather", parameters=json.dumps(CITY)), pb.Tool(name="clock")],
        **fields,
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_the_grpc_front_end_says_the_same(tooled: FrontEnds, stream: bool) -> None:
    say(tooled, TWO_CALLS)
    calls: dict[int, list[str]] = {}
    text, finish = "", ""
    async for message in tooled.inference.Generate(grpc_request(stream=stream), timeout=60):
        for choice in message.choices:
            text += choice.text
            finish = choice.finish_reason or finish
            for delta in choice.tool_calls:
                if delta.HasField("id"):
                    calls[delta.index] = [delta.name, ""]
                calls[delta.index][1] += delta.arguments
    assert (text, finish) == ("I look.", "tool_calls")
    assert json.loads(calls[0][1]) == {"city": "Bodø 🙂"}
    assert [call[0] for call in calls.values()] == ["weather", "clock"]
    http = {"messages": HI, "tools": [WEATHER, CLOCK]}
    await tooled.post("/v1/chat/completions", http)
    one, other = tooled.fleet.workers[1].submitted
    assert one.prompt_ids == other.prompt_ids


async def test_special_tokens_mark_the_calls_of_some_models(
    fleet: StubFleet, tmp_path: Path
) -> None:

    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    mark = tokenizer.token_to_id("[TOOL_CALLS]")
    template = CHATML + "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}"
    folder = write_model_text(tmp_path / "tiny", tokenizer=tokenizer, template=template)
    async with open_front_ends(fleet, folder) as front_ends:
        written = '[{"name": "clock", "arguments": {}}]'
        for worker in fleet.workers:
            worker.script = lambda _submit: [mark, *letters(written), 2]
        body = {"messages": HI, "tools": [CLOCK], "tool_choice": "required"}
        status, answer = await front_ends.post("/v1/chat/completions", body)
        assert status == 200, answer
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert (call["function"], len(call["id"])) == ({"name": "clock", "arguments": "{}"}, 9)
        assert f"<[{mark}]>" in fleet.workers[1].submitted[0].grammar.source


async def test_tokens_that_are_text_mark_the_calls_of_others(
    fleet: StubFleet, tmp_path: Path
) -> None:
    """To a grammar they are single tokens, as in what such a model has learnt, and no text."""
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    begin, end = map(tokenizer.token_to_id, ("<tool_call>", "</tool_call>"))
    folder = write_model_text(tmp_path / "tiny", tokenizer=tokenizer, context=4000)
    async with open_front_ends(fleet, folder, chat_template=str(HERMES)) as front_ends:
        written = letters('\n{"name": "clock", "arguments": {}}\n')
        for worker in fleet.workers:
            worker.script = lambda _submit: [begin, *written, end, 2]
        body = {"messages": HI, "tools": [CLOCK], "tool_choice": "required"}
        status, answer = await front_ends.post("/v1/chat/completions", body)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    grammar = fleet.workers[1].submitted[0].grammar
    vocabulary = load_vocabulary(folder, 512)
    assert grammar is not None
    assert vocabulary is not None
    matcher = Compiler(vocabulary).start(grammar, ends=[2])
    for token in [begin, *written, end]:
        matcher.take([token])
        compute_masks([matcher])
        assert not matcher.error
    assert matcher.state.is_accepting()


async def test_what_cannot_be_served_is_refused_by_name(
    tooled: FrontEnds, client: AsyncOpenAI, make_front_ends: MakeFrontEnds
) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    picky = {"type": "function", "function": {"name": "picky", "parameters": unique}}
    for fields, param in [
        ({"tools": [CLOCK, picky], "tool_choice": "required"}, "tools[1].function.parameters"),
        (
            {"tools": [CLOCK], "tool_choice": NAMED, "extra_body": {"ignore_eos": True}},
            "ignore_eos",
        ),
        ({"tools": [CLOCK], "extra_body": {"guided_regex": "a"}}, "guided_regex"),
    ]:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI, **fields)
        assert caught.value.param == param
    say(tooled, "fine")
    await client.chat.completions.create(model="tiny", messages=HI, tools=[CLOCK, picky])
    assert len(tooled.fleet.workers[1].submitted) == 1
    async with make_front_ends(tooled.fleet) as toolless:
        status, answer = await toolless.post(
            "/v1/chat/completions", {"messages": HI, "tools": [CLOCK]}
        )
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "template" in answer["error"]["message"]


async def test_tokenize_knows_tools(tooled: FrontEnds) -> None:
    say(tooled, "hi")
    fields = {"messages": HI, "tools": [WEATHER, CLOCK]}
    _, answer = await tooled.post("/v1/chat/completions", fields)
    _, tokens = await tooled.post("/tokenize", fields)
    assert tokens["count"] == answer["usage"]["prompt_tokens"]
    _, plain = await tooled.post("/tokenize", fields | {"tool_choice": "none"})
    assert plain["count"] < tokens["count"]
    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
    tools = [
        pb.Tool(name="weather", parameters=json.dumps(CITY)),
        pb.Tool(name="clock"),
    ]
    reply = await tooled.inference.Tokenize(pb.TokenizeRequest(chat=chat, tools=tools))
    assert list(reply.tokens) == tokens["tokens"]


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an output may begin with `text`."""
    try:
        Compiler(byte_vocabulary({})).start(grammar, output=list(text.encode()))
    except InvalidRequest:
        return False
    return True


async def test_forced_arguments_are_an_object_whatever_the_schema_says(tooled: FrontEnds) -> None:
    either = {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": either}}
    say(tooled, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    status, _ = await tooled.post(
        "/v1/chat/completions", {"messages": HI, "tools": [tool], "tool_choice": "required"}
    )
    assert status == 200
    grammar = tooled.fleet.workers[1].submitted[-1].grammar
    assert grammar is not None
    start = '<tool_call>\n{"name": "f", "arguments": '
    assert accepts(grammar, start + '{"a": 1}}\n</tool_call>')
    assert not accepts(grammar, start + '"text"}\n</tool_call>')


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_special_tokens_are_left_out_of_the_text_with_tools_too(
    tooled: FrontEnds, choice: str
) -> None:
    for worker in tooled.fleet.workers:
        worker.script = lambda _submit: [1, *letters("a"), 0, 1, *letters("b"), 1, 2]
    for skip, content in ((True, "ab"), (False, "<|im_start|>a<|endoftext|><|im_start|>b")):
        body = {"messages": HI, "tools": [WEATHER], "tool_choice": choice}
        body["skip_special_tokens"] = skip
        _, answer = await tooled.post("/v1/chat/completions", body)
        shown = answer["choices"][0]["message"]["content"]
        assert shown.removesuffix("<|im_start|>") == content
        body["stop"] = "<|im_start|>b"  # stop strings match alike, with tools and without
        _, answer = await tooled.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == content[: -1 if skip else -13]


#: One call in each format, by the models that write it.
WRITTEN = {
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nBodø 🙂\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": '{"name": "weather", "parameters": {"city": "Bodø 🙂"}}',
    "pythonic": "[weather(city='Bodø 🙂')]",
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bodø 🙂"}}]',
    "mistral_named": '[TOOL_CALLS]weather[ARGS]{"city": "Bodø 🙂"}',
    "phi4": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bodø 🙂"}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bodø 🙂"}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Bodø 🙂"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Bodø 🙂"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bodø 🙂"}',
    "gemma": "<start_function_call>call:weather{city:<escape>Bodø 🙂<escape>}<end_function_call>",
}


@pytest.mark.parametrize("tool_format", WRITTEN)
async def test_the_official_client_assembles_calls_of_every_format(
    fleet: StubFleet, tmp_path: Path, tool_format: str
) -> None:
    """With marks that are special tokens, as in the models' own vocabularies."""
    await fleet.add(Role.DECODE)
    tokenizer = byte_level()
    marks = ToolFormat(tool_format).marks
    tokenizer.add_special_tokens(list(marks))
    folder = write_model_text(tmp_path / "tiny", tokenizer=tokenizer, context=4000)
    settings = {"chat_template": str(HERMES), "tool_format": tool_format}
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", WRITTEN[tool_format])
    ids = [[tokenizer.token_to_id(part)] if part in marks else letters(part) for part in parts]
    fields: Any = {"model": "tiny", "messages": HI, "tools": [WEATHER, CLOCK]}
    async with open_front_ends(fleet, folder, **settings) as front_ends:
        fleet.workers[0].script = lambda _submit: [*chain(*ids), 2]
        async with AsyncOpenAI(base_url=front_ends.url + "/v1", api_key="none") as client:
            whole = (await client.chat.completions.create(**fields)).choices[0]
            async with client.chat.completions.stream(**fields) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Bodø 🙂"}
