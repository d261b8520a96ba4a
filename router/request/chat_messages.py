"""The messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, check_depth

MAX_MESSAGES = 1 << 13
MAX_PARTS = 1 << 10
#: Parts and tool calls of all messages together: each takes microseconds to render.
MAX_ITEMS = 1 << 13


class ChatRole(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content; only texts are served."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name and its arguments: the text of a JSON object, as answers have it; from
    other places an object, or text that was cut short."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def arguments(self) -> dict[str, Any] | str:
        """The arguments as an object, which templates write as JSON themselves; as text when they
        are none. Raises RecursionError."""
        arguments = self.function.arguments
        if isinstance(arguments, dict):
            return arguments
        if not arguments:
            return {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        try:
            return _OBJECT.decode(text)
        except msgspec.DecodeError:
            return text


_OBJECT = msgspec.json.Decoder(dict[str, Any])
Content = str | Annotated[Sequence[TextPart], Meta(max_length=MAX_PARTS)]


class ChatMessage(Body, tag_field="role"):
    """What all messages have in common."""

    neutral = ([],)
    role: ClassVar[ChatRole]

    content: Content | None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content; parts are joined by line breaks."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class SystemMessage(ChatMessage, tag="system"):
    """Instructions of the application."""

    role = ChatRole.SYSTEM
    content: Content


class DeveloperMessage(SystemMessage, tag="developer"):
    """OpenAI's newer name of a system message; templates know the older one."""


class UserMessage(ChatMessage, tag="user"):
    """What the user says."""

    role = ChatRole.USER
    content: Content


class AssistantMessage(ChatMessage, tag="assistant"):
    """What the model said. It has no content when it only called tools, or said nothing. Templates
    decide which reasoning of earlier answers the model sees again; `reasoning` is another name."""

    unserved = frozenset({"function_call", "audio"})
    role = ChatRole.ASSISTANT
    content: Content | None = None
    tool_calls: Annotated[Sequence[ToolCall], Meta(max_length=MAX_PARTS)] | None = None
    refusal: None = None  # in every answer, so in the messages that clients send back
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(ChatMessage, tag="tool"):
    """The result of the call `tool_call_id`."""

    role = ChatRole.TOOL
    content: Content
    tool_call_id: str


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[Sequence[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a template is given besides messages and tools. The prompt ends where the assistant's
    answer begins (`generate`), or inside the last message, which the model continues."""

    generate: bool = True
    continues: bool = False
    documents: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAIN = TemplateOptions()
#: Names in templates that no variable of a request may take.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def template_options(
    messages: Sequence[AnyMessage],
    *,
    generate: bool | None,
    continues: bool,
    documents: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any],
) -> TemplateOptions:
    """Checked options of a request. Raises InvalidRequest naming the field."""
    if continues and generate:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            param="add_generation_prompt",
        )
    if continues and not messages[-1].text.strip():
        raise InvalidRequest(
            "continue_final_message needs a last message with text", param="continue_final_message"
        )
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        param = f"chat_template_kwargs.{taken[0]}"
        raise InvalidRequest(f"{param} is a field of its own", param=param)
    check_depth(variables, "chat_template_kwargs")
    check_depth(documents, "documents")
    return TemplateOptions(
        generate=not continues if generate is None else generate,
        continues=continues,
        documents=documents,
        variables=variables,
    )


def check_messages(messages: Sequence[AnyMessage]) -> None:
    """Raise InvalidRequest naming what the types of the fields do not say."""
    num_items = 0
    for i, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            num_items += len(content)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            num_items += len(message.tool_calls)
            _check_calls(message, f"messages[{i}]")
    if num_items > MAX_ITEMS:
        raise InvalidRequest(
            f"messages: at most {MAX_ITEMS} parts and tool calls, got {num_items}",
            param="messages",
        )


def _check_calls(message: AssistantMessage, path: str) -> None:
    for j, call in enumerate(message.tool_calls or ()):
        param = f"{path}.tool_calls[{j}].function.arguments"
        try:
            check_depth(call.arguments(), param)
        except RecursionError:
            raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
