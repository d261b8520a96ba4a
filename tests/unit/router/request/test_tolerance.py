"""Fields that are unknown or change nothing are left out and named; others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import BatonError, ErrorCode
from protocol.ids import Role
from router.anthropic.request import MessagesRequest
from router.request.body import HARMLESS, HINTS, UNSERVED
from router.request.chat_messages import AssistantMessage
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.parse import parse_fields, parse_json
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters
from tests.support.stub_workers import StubFleet

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def parse(fields: dict[str, Any]) -> tuple[ChatRequest, list[str]]:
    ignored: list[str] = []
    body = json.dumps({"messages": HI} | fields).encode()
    return parse_json(body, ChatRequest, ignored), ignored


@pytest.mark.parametrize("field", [*sorted(HARMLESS), *sorted(HINTS), "nonsense", "nvext"])
def test_what_changes_nothing_is_left_out_and_named(field: str) -> None:
    request, ignored = parse({field: {"asks": "for something"}})
    assert request == parse({})[0]
    assert ignored == [field]


@pytest.mark.parametrize("field", sorted(UNSERVED))
def test_what_changes_the_result_is_refused(field: str) -> None:
    with pytest.raises(BatonError) as caught:
        parse({field: {"asks": "for something"}})
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, field)


def test_what_serves_the_purpose_is_named() -> None:
    with pytest.raises(BatonError, match=r"^regex is not supported yet; use guided_regex$"):
        parse({"regex": "[0-9]+"})


def test_special_tokens_are_added_to_completions_and_not_to_chats() -> None:
    assert parse({"add_special_tokens": False})[1] == []
    ignored: list[str] = []
    parse_json(b'{"prompt": "a", "add_special_tokens": true}', CompletionRequest, ignored)
    assert ignored == []
    with pytest.raises(BatonError, match="add_special_tokens is not supported"):
        parse({"add_special_tokens": True})
    with pytest.raises(BatonError, match="add_special_tokens is not supported"):
        parse_json(b'{"prompt": "a", "add_special_tokens": false}', CompletionRequest, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "king", "content": "a"}]},
            "messages[0].role must be one of system, user, assistant, tool, developer, got 'king'",
        ),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max, "
            "got 'huge'",
        ),
    ],
)
def test_an_error_lists_what_a_field_may_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BatonError) as caught:
        parse(fields)
    assert caught.value.message == message


def test_neutral_values_are_not_worth_a_word() -> None:
    neutral = {name: values[0] for name, values in (UNSERVED | HINTS).items() if values}
    assert parse(neutral) == (parse({})[0], [])
    assert parse({"best_of": 2, "n": 2})[1] == []


def test_a_field_of_the_other_kind_is_refused_unless_it_asks_for_nothing() -> None:
    assert parse({"echo": False})[1] == ["echo"]
    with pytest.raises(BatonError, match="echo is a field of completions"):
        parse({"echo": True})
    with pytest.raises(BatonError, match="tools is a field of chat"):
        parse_json(b'{"prompt": "a", "tools": [1]}', CompletionRequest, [])


@pytest.mark.parametrize(
    "field",
    [
        {"skip_special_tokens": False},
        {"include_reasoning": False},
        {"add_generation_prompt": False},
        {"parallel_tool_calls": False},
        {"prompt_logprobs": 0},
        {"max_completion_tokens": 0},
    ],
)
def test_what_is_false_or_zero_may_ask_for_something(field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **field}
    with pytest.raises(BatonError) as caught:
        parse_fields(body, MessagesRequest, [])
    (name,) = field
    assert caught.value.param == name
    assert caught.value.message == f"{name} is a field of chat, not of messages"


def test_unknown_fields_inside_are_named_by_their_place() -> None:
    user = {
        "role": "user",
        "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "id": 7,
    }
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    request, ignored = parse({"messages": [user], "tools": [tool]})
    assert request.messages[0].text == "a"
    assert sorted(ignored) == [
        "messages[0].content[0].cache_control",
        "messages[0].id",
        "tools[0].cache_control",
    ]


@pytest.mark.parametrize(
    "place",
    [
        ("messages", "function_call"),
        ("messages", "audio"),
    ],
)
def test_inside_too_what_changes_the_result_is_refused(place: tuple[str, str]) -> None:
    outer, name = place
    inside = [{"role": "assistant", "content": "a", name: {"x": 1}}]
    with pytest.raises(BatonError) as caught:
        parse({outer: inside})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert (caught.value.param or "").endswith(name)


#: (message, its text, its reasoning), as clients send back what servers said.
REPLAYED = [
    ({"content": None}, "", None),
    ({}, "", None),
    ({"content": None, "tool_calls": []}, "", None),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", None),
    ({"content": "a", "reasoning_content": ""}, "a", ""),
    ({"content": "a", "reasoning_content": "why", "annotations": []}, "a", "why"),
    ({"content": "a", "provider_specific_fields": {"refusal": None}, "audio": None}, "a", None),
]


@pytest.mark.parametrize(("message", "text", "reasoning"), REPLAYED)
def test_messages_as_clients_replay_them(
    message: dict[str, Any], text: str, reasoning: str | None
) -> None:
    request, _ = parse({"messages": [*HI, {"role": "assistant"} | message, *HI]})
    replayed = request.messages[1]
    assert isinstance(replayed, AssistantMessage)
    assert (replayed.text, replayed.reasoning_content) == (text, reasoning)


async def test_a_header_names_what_was_left_out(front_ends: FrontEnds) -> None:
    url, body = front_ends.url + "/v1/chat/completions", {"messages": HI, "max_tokens": 2}
    odd = {"store": True, "x y": 1, "metadata": {}} | {f"f{i}": 1 for i in range(40)}
    messages = [{**HI[0], "id": 1}, {**HI[0], "id": 2}]
    for extra, stream in ((odd, False), ({"messages": messages}, True)):
        async with front_ends.http.post(url, json=body | extra | {"stream": stream}) as response:
            assert response.status == 200
            named = response.headers["baton-ignored-fields"].split(", ")
        if stream:
            assert named == ["messages[].id"]
        else:
            assert named[:3] == ["store", "x?y", "metadata"]
            assert (len(named), named[-1]) == (33, "...")
    async with front_ends.http.post(url, json=body) as response:
        assert "baton-ignored-fields" not in response.headers


async def test_strictly_nothing_unknown_passes(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, strict_requests=True) as front_ends:
        for extra, code in (({"store": True}, "unsupported"), ({"nvext": {}}, "invalid_request")):
            status, answer = await front_ends.post(
                "/v1/chat/completions", {"messages": HI, "max_tokens": 2} | extra
            )
            assert (status, answer["error"]["code"]) == (400, code)
        status, _ = await front_ends.post(
            "/v1/chat/completions", {"messages": HI, "max_tokens": 2, "metadata": {"a": "b"}}
        )
        assert status == 200


async def test_answers_name_the_system_and_what_stopped_them(front_ends: FrontEnds) -> None:
    front_ends.say(letters("Hello there"))
    body = {"prompt": "a", "max_tokens": 8, "stop": ["zz", "o t", " t"]}
    _, stopped = await front_ends.post("/v1/completions", body)
    assert stopped["choices"][0]["stop_reason"] == "o t"
    assert stopped["system_fingerprint"].startswith("fp_")
    token = letters("l")[0]
    _, ended = await front_ends.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 8, "stop_token_ids": [token]}
    )
    assert ended["choices"][0] | {"text": ""} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": token,
    }
    assert ended["system_fingerprint"] == stopped["system_fingerprint"]
    _, cut = await front_ends.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert "stop_reason" not in cut["choices"][0]


async def test_the_last_tokens_of_a_prompt_may_be_kept_alone(front_ends: FrontEnds) -> None:
    kept = list(range(40, 50))
    for prompt in (list(range(30, 50)), [7] * 600 + kept):
        _, answer = await front_ends.post(
            "/v1/completions",
            {
                "prompt": prompt,
                "max_tokens": 2,
                "truncate_prompt_tokens": 10,
                "return_token_ids": True,
            },
        )
        assert answer["choices"][0]["prompt_token_ids"] == kept
        assert answer["usage"]["prompt_tokens"] == 10
    status, answer = await front_ends.post(
        "/v1/completions", {"prompt": "a", "echo": True, "truncate_prompt_tokens": 1}
    )
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
