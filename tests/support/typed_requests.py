"""Typed requests from the fields of a JSON body."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.request.chat_messages import AnyMessage
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.parse import parse_json
from router.request.tools import ToolUse

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return parse_json(json.dumps({"messages": HI} | fields).encode(), ChatRequest)


def completion(**fields: object) -> CompletionRequest:
    return parse_json(json.dumps({"prompt": "hi"} | fields).encode(), CompletionRequest)


def chat_messages(messages: object) -> Sequence[AnyMessage]:
    return chat(messages=messages).messages


def chat_tools(fields: dict[str, Any]) -> ToolUse | None:
    return chat(**fields).tool_use
