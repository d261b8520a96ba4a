"""The messages of a chat, as clients write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from router.request import fields as read

MAX_MESSAGES = 1 << 13
_MAX_PARTS = 1 << 10
#: Parts and tool calls of all messages together: each takes microseconds on the event loop.
_MAX_ITEMS = 1 << 13


class ChatRole(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made earlier."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message; parts of type text are joined by line breaks.

    `content` is empty when the assistant only called tools. A tool's message answers the call
    `tool_call_id`.
    """

    role: ChatRole
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def parse_messages(value: object) -> tuple[ChatMessage, ...]:
    """The messages of a chat; at least one."""
    if value is None:
        raise InvalidRequest("messages is required", param="messages")
    messages = read.as_array(value, "messages")
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    read.check_count(messages, MAX_MESSAGES, "messages")
    check_items(len(_listed(m, "content")) + len(_listed(m, "tool_calls")) for m in messages)
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(messages))


def check_items(counts: Iterable[int]) -> None:
    """Raise InvalidRequest when messages have too many parts and tool calls, so many each: before
    anybody looks at them."""
    total = sum(counts)
    if total > _MAX_ITEMS:
        raise InvalidRequest(
            f"messages: at most {_MAX_ITEMS} parts and tool calls, got {total}", param="messages"
        )


def _listed(message: object, name: str) -> list[Any]:
    items = message.get(name) if isinstance(message, dict) else None
    return items if isinstance(items, list) else []


def _message(value: object, path: str) -> ChatMessage:
    message = read.as_object(value, path)
    role = _role(message.get("role"), f"{path}.role")
    known = {"role", "content", "name"}
    if role is ChatRole.ASSISTANT:
        known.add("tool_calls")
    elif role is ChatRole.TOOL:
        known.add("tool_call_id")
    for name, item in message.items():
        if name not in known and item is not None and item != []:
            raise Unsupported(f"{path}.{name} is not supported", param=f"{path}.{name}")
    calls = message.get("tool_calls")
    calls = [] if calls is None else read.as_array(calls, f"{path}.tool_calls")
    read.check_count(calls, _MAX_PARTS, f"{path}.tool_calls")
    author, call_id = message.get("name"), message.get("tool_call_id")
    if role is ChatRole.TOOL and call_id is None:
        raise InvalidRequest(f"{path}.tool_call_id is required", param=f"{path}.tool_call_id")
    return ChatMessage(
        role=role,
        content=_content(message.get("content"), f"{path}.content", optional=bool(calls)),
        name=None if author is None else read.as_text(author, f"{path}.name"),
        tool_calls=tuple(
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)
        ),
        tool_call_id=None if call_id is None else read.as_text(call_id, f"{path}.tool_call_id"),
    )


def _role(value: object, path: str) -> ChatRole:
    if value is None:
        raise InvalidRequest(f"{path} is required", param=path)
    role = read.as_text(value, path)
    if role == "developer":  # the newer name of the same thing; templates know the older one
        return ChatRole.SYSTEM
    if role == "function":
        raise Unsupported(f"{path}: function messages are not supported, use tool", param=path)
    try:
        return ChatRole(role)
    except ValueError:
        known = ", ".join(ChatRole)
        raise InvalidRequest(f"{path} must be one of {known}, got {role!r}", param=path) from None


def _content(value: object, path: str, *, optional: bool) -> str:
    if value is None:
        if optional:
            return ""
        raise InvalidRequest(f"{path} is required", param=path)
    if isinstance(value, str):
        return read.as_text(value, path)
    if not isinstance(value, list):
        raise read.wrong_type(path, "a string or an array of parts", value)
    read.check_count(value, _MAX_PARTS, path)
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(value: object, path: str) -> str:
    part = read.as_object(value, path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise read.wrong_type(f"{path}.type", "a string", kind)
    if kind != "text":
        raise Unsupported(f"{path}: parts of type {kind!r} are not supported", param=f"{path}.type")
    return read.as_text(part.get("text"), f"{path}.text")


def _tool_call(value: object, path: str) -> ToolCall:
    call = read.as_object(value, path)
    kind = call.get("type", "function")
    if kind != "function":
        raise Unsupported(f"{path}: calls of type {kind!r} are not supported", param=f"{path}.type")
    function = read.as_object(call.get("function"), f"{path}.function")
    return ToolCall(
        id=read.as_text(call.get("id"), f"{path}.id"),
        name=read.as_text(function.get("name"), f"{path}.function.name"),
        arguments=_arguments(function.get("arguments"), f"{path}.function.arguments"),
    )


def _arguments(value: object, path: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they are given the object."""
    text = read.as_text(value, path)
    try:
        arguments = read.as_object(json.loads(text or "{}"), path)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path} must be the text of a JSON object", param=path) from None
    read.check_depth(arguments, path)
    return arguments
