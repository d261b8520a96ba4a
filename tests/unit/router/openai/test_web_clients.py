"""Requests as Open WebUI 0.12 sends them: chats with all of its settings, its tasks, its calls,
over chat and over responses. None is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.ids import Role
from tests.support.router_front_ends import FrontEnds, open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import write_model_text

TEMPLATE = Path(__file__).parents[4] / "deploy" / "templates" / "chatml_tools.jinja"
CALL = {"name": "search", "arguments": '{"query": "a"}'}
TOOL: dict[str, Any] = {
    "name": "search",
    "description": "Search.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
SETTINGS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": 1,
    "stop": ["###"],
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": {"42": -5},
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
}
SYSTEM = {"role": "system", "content": "Be short."}
HISTORY: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "index": 0, "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "found"},
    {"role": "assistant", "content": "It is there."},
    {"role": "user", "content": "thanks"},
]
CHATS: dict[str, dict[str, Any]] = {
    "a chat": {"stream": True, "messages": HISTORY, **SETTINGS},
    "with usage": {"stream": True, "messages": HISTORY, "stream_options": {"include_usage": True}},
    "with tools": {
        "stream": True,
        "messages": HISTORY,
        "tools": [{"type": "function", "function": TOOL}],
    },
    "a title": {"stream": False, "messages": HISTORY[1:2], "max_completion_tokens": 8},
    "continued": {
        "stream": True,
        "messages": HISTORY[:5],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "settings of other servers": {
        "stream": True,
        "messages": HISTORY,
        "repeat_penalty": 1.1,
        "mirostat": 0,
        "num_ctx": 2048,
        "keep_alive": "5m",
    },
}
RESPONSE: dict[str, Any] = {
    "stream": True,
    "instructions": "Be short.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hello"}],
        },
        {"type": "function_call", "call_id": "c", **CALL},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is there."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ],
    "tools": [{"type": "function", "strict": False, **TOOL}],
    "max_output_tokens": 8,
    "temperature": 0.7,
    "min_p": 0.05,
    "reasoning_effort": "low",
}


@pytest.fixture
async def front_ends(fleet: StubFleet, tmp_path: Path) -> AsyncIterator[FrontEnds]:
    for role in Role:
        await fleet.add(role)
    folder = write_model_text(tmp_path / "tiny", context=4000)
    async with open_front_ends(
        fleet, folder, chat_template=str(TEMPLATE), served_model_name="tiny"
    ) as front_ends:
        yield front_ends


async def test_it_lists_models_and_every_request_is_served(front_ends: FrontEnds) -> None:
    headers = {"authorization": "Bearer none", "content-type": "application/json"}
    async with front_ends.http.get(front_ends.url + "/v1/models", headers=headers) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
    requests = [("/v1/chat/completions", {"max_tokens": 4, **body}) for body in CHATS.values()]
    requests[3][1].pop("max_tokens")
    ignored = []
    for path, body in [*requests, ("/v1/responses", RESPONSE)]:
        async with front_ends.http.post(
            front_ends.url + path, json={"model": "tiny", **body}, headers=headers
        ) as response:
            text = await response.text()
            assert response.status == 200, (body, text)
            ignored.append(response.headers.get("baton-ignored-fields", ""))
            assert ("data: [DONE]" in text) is (path != "/v1/responses" and body["stream"])
    assert ignored[:5] == [""] * 5
    assert ignored[5].startswith("repeat_penalty, mirostat, num_ctx, keep_alive")
    assert ignored[6] == ""
    assert front_ends.fleet.workers[-1].submitted[-1].sampling.min_p == 0.05
