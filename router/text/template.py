"""Chat templates: the model's own Jinja, in a sandbox that can neither write nor reach Python.

The conventions are those of Hugging Face's `apply_chat_template`: block trimming, loop controls,
`raise_exception`, `strftime_now`, `tojson` without escapes for HTML, and the special tokens by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest

#: What a template can raise because of the messages it was given.
_RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, OverflowError),
)


class ChatTemplate:
    """A compiled template. Raises ValueError when the template itself does not parse.

    knows_tools, knows_calls: whether it writes the tools, and the calls of earlier turns.
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
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The prompt for `messages`, ready for the assistant's turn. Raises InvalidRequest with the
        template's own message when it refuses them."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=list(tools) or None,
                documents=None,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only lets it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
