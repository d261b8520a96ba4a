"""Bodies of the Responses API (https://platform.openai.com/docs/api-reference/responses), and the
chat requests that they become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.errors import InvalidRequest, Unsupported
from router.request.body import Body, Int64
from router.request.chat_messages import MAX_ITEMS, MAX_PARTS
from router.request.endpoints import ChatRequest
from router.request.parse import parse_object
from router.request.tools import MAX_TOOLS
from router.request.translated import Names, TranslatedRequest, chat_request

NAMES: Names = (
    (re.compile(r"^(max_tokens|max_completion_tokens)$"), "max_output_tokens"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\.schema"), "text.format.schema"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^messages\b.*"), "input"),
)
_LOGPROBS = "message.output_text.logprobs"


class ContentPart(Body):
    """A part of a message, of a tool's result or of a thought: texts only."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Content = str | Annotated[Sequence[ContentPart], Meta(max_length=MAX_PARTS)]


class InputItem(Body):
    """What all items may carry."""

    type: str = "message"
    id: str | None = None
    status: str | None = None


class MessageItem(InputItem):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: str | None = None


class CallItem(InputItem):
    """A call that the model made earlier."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(InputItem):
    """What a call gave."""

    call_id: str
    output: _Content


class ReasoningItem(InputItem):
    """What the model thought earlier; this server encrypts nothing."""

    summary: Sequence[ContentPart] = ()
    content: Sequence[ContentPart] | None = None
    encrypted_content: str | None = None


INPUT_ITEMS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    """How much the model thinks. Thoughts are given whole, never summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    encrypted_content: str | None = None


Tool = dict[str, Any]


class InputTokensRequest(TranslatedRequest):
    """POST /v1/responses/input_tokens."""

    neutral = ([], {}, 0)
    unserved = frozenset({"prompt", "conversation", "top_logprobs"})

    input: str | Annotated[Sequence[dict[str, Any]], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[Sequence[Tool], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] = "disabled"


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses."""

    endpoint = "responses"

    max_output_tokens: Int64 | None = None
    store: bool = True
    background: bool = False
    metadata: dict[str, str] | None = None
    include: Sequence[str] = ()
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if _LOGPROBS in self.include:
            raise Unsupported(f"include: {_LOGPROBS} is not supported", param="include")
        if self.background and (self.stream or not self.store):
            param = "stream" if self.stream else "store"
            raise Unsupported(f"{param}: not supported with background", param=param)


def to_chat(
    request: InputTokensRequest,
    messages: Sequence[Mapping[str, Any]],
    ignored: list[str] | None,
) -> ChatRequest:
    """The chat request of a response to these messages. Tools that a server would have to run are
    left out, their places in `ignored`; without that list they are refused."""
    fields: dict[str, Any] = {
        "messages": _instructed(request.instructions, messages),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _form(request.text),
    }
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    tools = [_tool(tool, i, ignored) for i, tool in enumerate(request.tools)]
    if any(tools):
        fields["tools"] = [tool for tool in tools if tool]
    if request.tool_choice != "auto":
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if isinstance(request, ResponsesRequest):
        fields["max_completion_tokens"] = request.max_output_tokens
        fields["service_tier"] = request.service_tier
        fields["prompt_cache_retention"] = request.prompt_cache_retention
    return chat_request(request, fields, NAMES, ignored=ignored)


def input_items(request: InputTokensRequest) -> Sequence[Mapping[str, Any]]:
    """The input as items."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def new_messages(request: InputTokensRequest, ignored: list[str] | None) -> list[dict[str, Any]]:
    """The messages of chat that the input stands for. Raises InvalidRequest naming the item."""
    messages: list[dict[str, Any]] = []
    for i, fields in enumerate(input_items(request)):
        kind = INPUT_ITEMS.get(str(fields.get("type") or "message"))
        if kind is None:
            param = f"input[{i}].type"
            raise Unsupported(f"{param} {fields.get('type')!r} is not supported", param=param)
        _add_item(messages, parse_object(fields, kind, f"input[{i}]", ignored))
    return messages


def _add_item(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Thoughts, text and calls of one answer are one message of the assistant, in this order."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    match item:
        case MessageItem(role="assistant"):
            if "content" in last or "tool_calls" in last or not last:
                messages.append(last := {"role": "assistant"})
            last["content"] = _text(item.content)
        case MessageItem():
            messages.append({"role": item.role, "content": _text(item.content)})
        case ReasoningItem():
            if not last or "content" in last or "tool_calls" in last:
                messages.append(last := {"role": "assistant"})
            last["reasoning_content"] = _text(item.content or item.summary)
        case CallItem():
            if not last:
                messages.append(last := {"role": "assistant"})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        case CallOutputItem():
            content = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _text(content: _Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal for part in content)


def _instructed(
    instructions: str | None, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages behind the instructions. With those that developers send first they are one
    message: many templates take one of the system, at the beginning."""
    texts, rest = [instructions] if instructions else [], list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        texts.append(rest.pop(0)["content"])
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else ()), *rest]


def _form(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    form = text.format
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise InvalidRequest("text.format.schema is required", param="text.format.schema")
    schema = {"name": form.name or "output", "schema": form.schema}
    return {"type": form.type, "json_schema": schema}


def _tool(tool: Tool, index: int, ignored: list[str] | None) -> dict[str, Any] | None:
    kind, place = tool.get("type"), f"tools[{index}]"
    if kind == "function":
        return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}
    if ignored is None or not isinstance(kind, str):
        param = f"{place}.type"
        raise Unsupported(f"{param} {kind!r} is not supported", param=param)
    ignored.append(f"{place}.{kind}")
    return None


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return _named_tool(choice)
    if kind == "allowed_tools":
        tools = choice.get("tools")
        named = [_named_tool(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": named}}
    raise Unsupported(f"tool_choice.type {kind!r} is not supported", param="tool_choice.type")


def _named_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest("tool_choice must name functions", param="tool_choice")
    return {"type": "function", "function": {"name": tool.get("name")}}
