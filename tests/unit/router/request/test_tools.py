"""Tools and tool messages of a request, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import ErrorCode, InvalidRequest
from router.request.chat_messages import AssistantMessage, ChatRole, ToolMessage
from router.request.tools import ToolChoice
from tests.support.typed_requests import chat_messages, chat_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
NAMED = {"type": "function", "function": {"name": "now"}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "x", **fields}}


ALLOWED = "tool_choice.allowed_tools"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def refusal(fields: dict[str, Any]) -> tuple[ErrorCode, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        chat_tools(fields)
    return caught.value.code, caught.value.param


def test_tools_and_how_they_are_chosen() -> None:
    assert chat_tools({}) is None
    assert chat_tools({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}) is None
    assert chat_tools({"tools": [WEATHER], "tool_choice": "none"}) is None
    auto = chat_tools({"tools": [WEATHER, NOW]})
    assert auto is not None
    assert (auto.choice, auto.allowed, auto.parallel) == (ToolChoice.AUTO, None, True)
    assert [tool.name for tool in auto.callable_tools] == ["weather", "now"]
    assert json.loads(auto.tools[0].schema) == CITY
    assert auto.definitions[0] == WEATHER
    assert auto.definitions[1]["function"]["description"] == "The time."
    required = chat_tools({"tools": [WEATHER], "tool_choice": "required"})
    assert required is not None
    assert required.choice is ToolChoice.REQUIRED
    named = chat_tools(
        {"tools": [WEATHER, NOW], "tool_choice": NAMED, "parallel_tool_calls": False}
    )
    assert named is not None
    assert (named.choice, named.parallel) == (ToolChoice.NAMED, False)
    assert [tool.name for tool in named.callable_tools] == ["now"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_may_be_limited_to_some_of_the_tools(mode: str) -> None:
    use = chat_tools({"tools": [WEATHER, NOW], "tool_choice": allowed(mode, "now")})
    assert use is not None
    assert use.choice == mode
    assert [tool.name for tool in use.callable_tools] == ["now"]
    assert [tool.name for tool in use.tools] == ["weather", "now"]  # the prompt has all of them


def test_a_function_without_parameters_takes_none_and_one_without_a_type_takes_an_object() -> None:
    tools = chat_tools({"tools": [NOW, function(parameters={"properties": {"a": {}}})]})
    assert tools is not None
    assert json.loads(tools.tools[0].schema)["additionalProperties"] is False
    assert json.loads(tools.tools[1].schema)["type"] == "object"


BAD, NOT_SERVED = ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED
WRONG: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"tools": {}}, BAD, "tools"),
    ({"tools": [WEATHER] * 600}, BAD, "tools"),
    ({"tools": ["x"]}, BAD, "tools[0]"),
    ({"tools": [{}]}, BAD, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, NOT_SERVED, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, BAD, "tools[0].function"),
    ({"tools": [{**WEATHER, "cache": 1}]}, NOT_SERVED, "tools[0].cache"),
    ({"tools": [function(name=None)]}, BAD, "tools[0].function.name"),
    ({"tools": [function(name="a b")]}, BAD, "tools[0].function.name"),
    ({"tools": [function(name="a" * 129)]}, BAD, "tools[0].function.name"),
    ({"tools": [NOW, WEATHER, NOW]}, BAD, "tools[2].function.name"),
    ({"tools": [function(description=1)]}, BAD, "tools[0].function.description"),
    ({"tools": [function(parameters="x")]}, BAD, "tools[0].function.parameters"),
    (
        {"tools": [function(parameters={"type": "string"})]},
        BAD,
        "tools[0].function.parameters.type",
    ),
    ({"tools": [function(examples=[])]}, NOT_SERVED, "tools[0].function.examples"),
    ({"tool_choice": "required"}, BAD, "tool_choice"),
    ({"tool_choice": NAMED}, BAD, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "any"}, BAD, "tool_choice"),
    ({"tools": [NOW], "tool_choice": 5}, BAD, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "custom"}}, NOT_SERVED, "tool_choice.type"),
    ({"tools": [NOW], "tool_choice": allowed("auto", "no")}, BAD, f"{ALLOWED}.tools[0]"),
    ({"tools": [NOW], "tool_choice": allowed("auto")}, BAD, f"{ALLOWED}.tools"),
    ({"tools": [NOW], "tool_choice": allowed("must", "now")}, BAD, f"{ALLOWED}.mode"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, BAD, "tool_choice"),
    ({"tools": [NOW], "parallel_tool_calls": "no"}, BAD, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG)
def test_what_is_wrong_is_named(fields: dict[str, Any], code: ErrorCode, param: str) -> None:
    assert refusal(fields) == (code, param)


# --- messages -------------------------------------------------------------------------------------


def call(**changes: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    return {"id": "c1", "type": "function", "function": {**function, **changes}}


def test_calls_and_their_results_are_messages() -> None:
    messages = chat_messages(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call(), call(arguments="")]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5 C"}]},
        ]
    )
    assert isinstance(messages[1], AssistantMessage)
    assert messages[1].text == ""
    assert [c.arguments() for c in messages[1].tool_calls or ()] == [{"city": "Oslo"}, {}]
    assert isinstance(messages[2], ToolMessage)
    assert messages[2].role is ChatRole.TOOL
    assert (messages[2].tool_call_id, messages[2].text) == ("c1", "5 C")


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ({"city": "Oslo"}, {"city": "Oslo"}),
        (None, {}),
        ([], {}),
        ([1], "[1]"),
        ("null", "null"),
        ('{"city": "Os', '{"city": "Os'),
    ],
)
def test_arguments_come_back_in_any_form(sent: object, taken: object) -> None:
    """A conversation goes on after arguments that were cut short, or that are no object."""
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call(arguments=sent)]}])
    assert isinstance(message, AssistantMessage)
    assert [c.arguments() for c in message.tool_calls or ()] == [taken]


WRONG_MESSAGES: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"role": "tool", "content": "x"}, BAD, "messages[0].tool_call_id"),
    ({"role": "tool", "tool_call_id": "c"}, BAD, "messages[0].content"),
    ({"role": "function", "name": "f", "content": "x"}, NOT_SERVED, "messages[0].role"),
    (
        {"role": "assistant", "content": "", "function_call": {"name": "f"}},
        NOT_SERVED,
        "messages[0].function_call",
    ),
    ({"role": "user", "content": "", "tool_calls": [call()]}, NOT_SERVED, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": "x"}, BAD, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, BAD, "messages[0].tool_calls[0]"),
    (
        {"role": "assistant", "tool_calls": [{**call(), "type": "custom"}]},
        NOT_SERVED,
        "messages[0].tool_calls[0].type",
    ),
    (
        {"role": "assistant", "tool_calls": [{**call(), "id": None}]},
        BAD,
        "messages[0].tool_calls[0].id",
    ),
    (
        {"role": "assistant", "tool_calls": [call(arguments=5)]},
        BAD,
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"role": "assistant", "tool_calls": [call(arguments='{"a":' * 80 + "1" + "}" * 80)]},
        BAD,
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("message", "code", "param"), WRONG_MESSAGES)
def test_wrong_messages_are_named(message: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages([message])
    assert (caught.value.code, caught.value.param) == (code, param)
