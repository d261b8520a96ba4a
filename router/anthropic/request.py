"""Bodies of the Messages API (https://docs.anthropic.com/en/api/messages), and the chat requests
that they become."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.body import Body, Int64
from router.request.chat_messages import MAX_MESSAGES, MAX_PARTS
from router.request.endpoints import ChatRequest
from router.request.tools import MAX_TOOLS
from router.request.translated import (
    FittedChatRequest,
    Names,
    TranslatedRequest,
    chat_request,
    json_text,
)

NAMES: Names = (
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"^response_format.*"), "output_config.format"),
    (re.compile(r"^(messages\b.*|continue_final_message)$"), "messages"),
)


class CacheControl(Body):
    """Says that the conversation should return. Prefixes are cached without such marks: the longest
    `ttl` of a request is how long host memory keeps its KV after that of others."""

    type: str = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


_KEEP_S = {"5m": 300.0, "1h": 3600.0}


class _Block(Body, tag_field="type"):
    """Part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    citations: list[Any] | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    """A call that the model made earlier."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block, tag="tool_result"):
    """What a call gave. Templates have no word for a failed one: its text says so."""

    tool_use_id: str
    content: str | Annotated[Sequence[TextBlock], Meta(max_length=MAX_PARTS)] = ""
    is_error: bool | None = None


class ThinkingBlock(_Block, tag="thinking"):
    """What the model thought earlier; this server signs nothing."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """Thoughts that only another server can read: left out."""

    data: str


_AnyBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
_Text = str | Annotated[Sequence[TextBlock], Meta(max_length=MAX_PARTS)]


class Turn(Body):
    """A message: of the user, with results of tools, or of the model."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Sequence[_AnyBlock], Meta(max_length=MAX_PARTS)]


class MessagesTool(Body):
    """A function that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(Body):
    """How the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body):
    """Whether the model thinks before it answers, and, where its template knows budgets, how long;
    "omitted" thoughts are not shown."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    """The form of the answer, and the effort behind it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(TranslatedRequest):
    """POST /v1/messages/count_tokens."""

    neutral = ([], {}, "")
    unserved = frozenset({"mcp_servers", "container"})

    messages: Annotated[Sequence[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: _Text | None = None
    tools: Annotated[Sequence[MessagesTool], Meta(max_length=MAX_TOOLS)] = ()
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older place
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. A `max_tokens` that does not fit is cut. `service_tier` names a tier where
    it is neither of Anthropic's."""

    endpoint = "messages"

    max_tokens: Int64
    stop_sequences: Sequence[str] | None = None
    service_tier: str | None = None


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """The chat request of a message. Raises InvalidRequest naming the field."""
    fields: dict[str, Any] = {"messages": list(_messages(request))}
    if request.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    config = request.output_config or OutputConfig()
    form = config.format or request.output_format
    if form is not None:
        schema = {"name": "output", "schema": form.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if request.thinking is not None:
        fields["chat_template_kwargs"] = _variables(request.thinking)
    if isinstance(request, MessagesRequest):
        tier = request.service_tier
        fields |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "service_tier": None if tier in ("auto", "standard_only") else tier,
            "cache_keep_s": max(
                (_KEEP_S[mark.ttl] for mark in _cache_marks(request)), default=None
            ),
        }
    return chat_request(request, fields, NAMES, FittedChatRequest)


def _cache_marks(request: MessagesRequest) -> Iterator[CacheControl]:
    texts = [request.system, *(turn.content for turn in request.messages)]
    blocks = (block for text in texts if text and not isinstance(text, str) for block in text)
    for marked in (request, *request.tools, *blocks):
        if marked.cache_control is not None:
            yield marked.cache_control


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _plain(request.system)}
    for i, turn in enumerate(request.messages):
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, f"messages[{i}]")
        else:
            yield from _others(turn.role, turn.content, f"messages[{i}]")


def _assistant(blocks: Sequence[_AnyBlock], path: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for i, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {
                    "name": block.name,
                    "arguments": json_text(block.input, f"{path}.content[{i}].input"),
                }
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise _misplaced(f"{path}.content[{i}]", "tool_result", "user")
            case RedactedThinkingBlock():
                pass
    message = {"role": "assistant", "content": "".join(texts) or None, "tool_calls": calls}
    return message | {"reasoning_content": "".join(thoughts) or None}


def _others(role: str, blocks: Sequence[_AnyBlock], path: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, in their place among the texts."""
    texts: list[dict[str, str]] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append({"type": "text", "text": block.text})
        elif isinstance(block, ToolResultBlock) and role == "user":
            if texts:
                yield {"role": role, "content": texts}
                texts = []
            content = _plain(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        else:
            kind = str(block.__struct_config__.tag)
            raise _misplaced(f"{path}.content[{i}]", kind, "assistant")
    if texts or not blocks:
        yield {"role": role, "content": texts}


def _misplaced(path: str, kind: str, role: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {kind} belongs into messages of the {role}", param=path)


def _plain(text: _Text) -> str | list[dict[str, str]]:
    if isinstance(text, str):
        return text
    return [{"type": "text", "text": block.text} for block in text]


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {"description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
        kinds["tool"] = {"type": "function", "function": {"name": choice.name}}
    parallel = not choice.disable_parallel_tool_use
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}


def _variables(thinking: ThinkingConfig) -> dict[str, Any]:
    if thinking.type == "adaptive":
        return {}
    on = thinking.type != "disabled"
    budget = {} if thinking.budget_tokens is None else {"thinking_budget": thinking.budget_tokens}
    return {"enable_thinking": on, "thinking": on, **budget}
