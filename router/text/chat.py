"""A model's chat templates: one for plain chat and, where there is another, one for tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from router.request.chat_messages import AnyMessage, AssistantMessage, ChatRole, ToolMessage
from router.text.template import ChatTemplate
from router.text.tool_formats import ToolFormat, detect_format

#: Makes control tokens in a text that came from somebody of this role harmless.
Hide = Callable[[str, ChatRole], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """`tool_format` is how the model writes tool calls; None when that is not known."""

    plain: ChatTemplate | None
    with_tools: ChatTemplate | None
    tool_format: ToolFormat | None

    def render(
        self, messages: Sequence[AnyMessage], tools: Sequence[Mapping[str, Any]], hide: Hide
    ) -> str:
        """The prompt. Raises InvalidRequest when there is no template for it, or when the template
        refuses the messages."""
        template = self.with_tools if tools else self.plain
        if template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        if not template.knows_calls and any(map(_has_calls, messages)):
            raise Unsupported("the model's chat template has no tool calls", param="messages")
        return template.render(
            [_plain(message, hide) for message in messages],
            [_hidden(tool, ChatRole.SYSTEM, hide) for tool in tools],
        )

    def require_tools(self) -> ToolFormat:
        """How tool calls are written. Raises Unsupported when this model cannot be given tools."""
        if self.with_tools is None:
            raise Unsupported("tools: the model's chat template has no tools", param="tools")
        if self.tool_format is None:
            raise Unsupported("tools: it is not known how this model writes calls", param="tools")
        return self.tool_format


def chosen_source(file: str) -> str:
    """The template in the file that the configuration names. Raises ValueError, naming the field,
    when it cannot be read or does not parse."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"chat_template {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"chat_template {file}: is not UTF-8") from None
    try:
        ChatTemplate(source, {})
    except ValueError as error:
        raise ValueError(f"chat_template {file}: {error}") from None
    return source


def load_templates(
    folder: Path, settings: Mapping[str, Any], *, chosen: str, tool_format: str
) -> ChatTemplates:
    """The templates in `folder`, or the file `chosen`; `tool_format` instead of what the template
    looks like. Raises ValueError when one cannot be read or does not parse."""
    file = folder / "chat_template.jinja"
    source: Any = settings.get("chat_template")
    if chosen:
        source = chosen_source(chosen)
    elif file.is_file():
        source = file.read_text(encoding="utf-8")
    named = {"default": source}
    if isinstance(source, list):  # variants by name
        named = {item["name"]: item["template"] for item in source}
    tokens = special_texts(settings)
    plain = _template(named.get("default"), tokens)
    with_tools = _template(named.get("tool_use"), tokens) or plain
    if with_tools is not None and not with_tools.knows_tools:
        with_tools = None
    found = None if with_tools is None else detect_format(with_tools.source)
    return ChatTemplates(
        plain=plain,
        with_tools=with_tools,
        tool_format=ToolFormat(tool_format) if tool_format else found,
    )


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates know by name."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
    texts = {name: token_text(settings.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(value: object) -> str | None:
    """A special token is written as a string, or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(source: str | None, tokens: Mapping[str, str]) -> ChatTemplate | None:
    return ChatTemplate(source, tokens) if source else None


def _has_calls(message: AnyMessage) -> bool:
    return isinstance(message, AssistantMessage) and bool(message.tool_calls)


def _plain(message: AnyMessage, hide: Hide) -> dict[str, Any]:
    """A message as templates know it; what a tool says is trusted no more than a user."""
    role = message.role
    plain: dict[str, Any] = {"role": role.value, "content": hide(message.text, role)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = hide(message.tool_call_id, role)
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": hide(call.id, role),
                "type": "function",
                "function": {
                    "name": hide(call.function.name, role),
                    "arguments": _hidden(call.arguments(), role, hide),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _hidden(value: Any, role: ChatRole, hide: Hide) -> Any:
    """A JSON value with every text in it made harmless."""
    if isinstance(value, str):
        return hide(value, role)
    if isinstance(value, Mapping):
        return {hide(key, role): _hidden(item, role, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, role, hide) for item in value]
    return value
