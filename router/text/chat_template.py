"""Chat templates: the model's own Jinja, in a sandbox that can neither write nor reach Python.

The conventions are those of Hugging Face's `apply_chat_template`: block trimming, loop controls,
`raise_exception`, `strftime_now`, `tojson` without escapes for HTML, and the special tokens by
name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from observability.logging import get_logger
from protocol.errors import InvalidRequest, Unsupported
from router.request.chat_messages import (
    PLAIN,
    AnyMessage,
    AssistantMessage,
    ChatRole,
    TemplateOptions,
    ToolMessage,
)
from router.text.tool_formats import ToolFormat, detect_format

log = get_logger(__name__)

#: Special tokens that templates may name.
SPECIAL_NAMES = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
)
#: Neutralises control tokens in a text of a role (router.text.tokenizer).
Hide = Callable[[str, ChatRole], str]
#: What a template can raise because of its messages.
_RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, OverflowError),
)


class ChatTemplate:
    """A compiled template. Raises ValueError when the template itself does not parse.

    knows_tools, knows_calls: whether it renders tool definitions, and tool calls in messages.
    unset: special tokens that it names and that have no value.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            tree = environment.parse(source)
            names = meta.find_undeclared_variables(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self.source = source
        self.knows_tools = "tools" in names
        self.knows_calls = "tool_calls" in source
        self.unset = sorted(names & set(SPECIAL_NAMES) - set(special_tokens))
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN,
    ) -> str:
        """The prompt for `messages`. Raises InvalidRequest with the template's own message when it
        refuses them."""
        given = {
            **self._special_tokens,
            **options.variables,
            "messages": list(messages),
            "add_generation_prompt": options.generate,
            "tools": list(tools) or None,
            "documents": list(options.documents) or None,
        }
        try:
            return self._template.render(given)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """A model's templates: one for plain chat and one for tools, often the same. `tool_format` is
    how the model writes tool calls, None when unknown."""

    plain: ChatTemplate | None
    with_tools: ChatTemplate | None
    tool_format: ToolFormat | None

    def render(
        self,
        messages: Sequence[AnyMessage],
        tools: Sequence[Mapping[str, Any]],
        hide: Hide,
        options: TemplateOptions = PLAIN,
    ) -> str:
        """The prompt. Raises InvalidRequest when there is no template for it, or when the template
        refuses the messages."""
        template = self.with_tools if tools else self.plain
        if template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        if not template.knows_calls and any(map(_has_calls, messages)):
            raise Unsupported("the model's chat template has no tool calls", param="messages")
        plain = [_plain(message, hide) for message in messages]
        if options.continues:
            plain[-1]["content"] += _CONTINUED
        options = replace(
            options,
            documents=_hidden(list(options.documents), ChatRole.USER, hide),
            variables=_hidden(options.variables, ChatRole.USER, hide),
        )
        definitions = [_hidden(tool, ChatRole.SYSTEM, hide) for tool in tools]
        try:
            prompt = template.render(plain, definitions, options)
        except InvalidRequest:
            wrapped = _with_wrapped_arguments(plain)
            if wrapped is None:
                raise
            prompt = template.render(wrapped, definitions, options)
        return _cut_at_end_of_message(prompt) if options.continues else prompt

    def require_tools(self) -> ToolFormat:
        """How tool calls are written. Raises Unsupported when this model takes no tools."""
        if self.with_tools is None:
            raise Unsupported("tools: the model's chat template has no tools", param="tools")
        if self.tool_format is None:
            raise Unsupported("tools: this model's format of tool calls is unknown", param="tools")
        return self.tool_format


def chosen_source(file: str) -> str:
    """The template in the configured file. Raises ValueError, naming the field, when it cannot be
    read or does not parse."""
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
    """The templates in `folder`, or in the file `chosen`; `tool_format` overrides detection. Raises
    ValueError when a template cannot be read or does not parse."""
    named = {"default": chosen_source(chosen)} if chosen else _named_sources(folder, settings)
    tokens = special_texts(settings)
    plain = _template(named.get("default"), tokens)
    with_tools = _template(named.get("tool_use"), tokens) or plain
    if with_tools is not None and not with_tools.knows_tools:
        with_tools = None
    for template in {plain, with_tools} - {None}:
        if template is not None and template.unset:
            names = ", ".join(template.unset)
            log.warning(
                "the chat template uses tokens that the model's folder does not name: %s", names
            )
    found = None if with_tools is None else detect_format(with_tools.source)
    return ChatTemplates(
        plain=plain,
        with_tools=with_tools,
        tool_format=ToolFormat(tool_format) if tool_format else found,
    )


def _named_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates in a model's folder by name: files go before settings, as in transformers."""
    source: Any = settings.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(source, list):
        named = {item["name"]: item["template"] for item in source}
    elif source:
        named["default"] = source
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    found = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    return found or named


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates may name, with their texts."""
    more = settings.get("extra_special_tokens")
    named = {name: settings.get(name) for name in SPECIAL_NAMES}
    texts = {
        k: token_text(v) for k, v in ((more if isinstance(more, dict) else {}) | named).items()
    }
    return {name: text for name, text in texts.items() if text is not None}


def token_text(value: object) -> str | None:
    """The text of a special token: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(source: str | None, tokens: Mapping[str, str]) -> ChatTemplate | None:
    return ChatTemplate(source, tokens) if source else None


#: Put behind a message that the model continues, to find its end in the prompt. A character of
#: Unicode's private use, which no tokenizer needs.
_CONTINUED = "\ue002 "


def _cut_at_end_of_message(prompt: str) -> str:
    """A prompt up to where its last message ends; as transformers does, without the white space
    behind it where the template takes that off."""
    text, mark, _ = prompt.rpartition(_CONTINUED.strip())
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves the last message out",
            param="continue_final_message",
        )
    return text if prompt.startswith(_CONTINUED, len(text)) else text.rstrip()


def _has_calls(message: AnyMessage) -> bool:
    return isinstance(message, AssistantMessage) and bool(message.tool_calls)


def _plain(message: AnyMessage, hide: Hide) -> dict[str, Any]:
    """A message as templates take it; tool messages are trusted no more than a user's."""
    role = message.role
    plain: dict[str, Any] = {"role": role.value, "content": hide(message.text, role)}
    if message.name is not None:
        plain["name"] = hide(message.name, role)
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = hide(message.tool_call_id, role)
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain["reasoning_content"] = hide(reasoning, role)
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


def _with_wrapped_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with an object around arguments that are no JSON object, for templates that look
    into arguments; None when there are no such arguments."""
    found = False
    wrapped = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                found = True
                call = call | {"function": call["function"] | {"arguments": {"text": arguments}}}
            calls.append(call)
        wrapped.append(message | {"tool_calls": calls} if calls else message)
    return wrapped if found else None


def _hidden(value: Any, role: ChatRole, hide: Hide) -> Any:
    """A JSON value with every text in it neutralised."""
    if isinstance(value, str):
        return hide(value, role)
    if isinstance(value, Mapping):
        return {hide(key, role): _hidden(item, role, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, role, hide) for item in value]
    return value
