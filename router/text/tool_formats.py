"""The formats that models write tool calls in, and grammars that enforce them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum

from grammar.bounds import JSON_WHITESPACE
from router.request.tools import Function

PYTHON_TAG = "<|python_tag|>"


class ToolFormat(StrEnum):
    """Formats of tool calls.

    HERMES (also Qwen): each call is JSON between `<tool_call>` and `</tool_call>`, anywhere in the
    text. LLAMA (3.1 and later): the whole text is JSON with `parameters`, several separated by
    semicolons, perhaps after `<|python_tag|>`. MISTRAL: `[TOOL_CALLS]`, then an array of calls, or
    names with their arguments.
    """

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"

    @property
    def begin(self) -> str:
        """The mark that begins a call within text; empty for formats without one."""
        return _BEGINS[self]

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that calls have, which may be special tokens."""
        return _MARKS[self]

    @property
    def arguments(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA else "arguments"


_BEGINS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA: "",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
}
_MARKS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA: (PYTHON_TAG,),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}


def detect_format(template: str) -> ToolFormat | None:
    """The format in which a chat template renders calls; None when unknown."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if PYTHON_TAG in template or "ipython" in template:
        return ToolFormat.LLAMA
    return None


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Function],
    *,
    several: bool,
    answer: str | None = None,
    special_id: Callable[[str], int | None],
) -> str:
    """A grammar in Lark's syntax for one call of these tools, or `several`; with `answer`, for JSON
    of that schema instead of calls, too.

    `special_id` is the id of a text that is a special token: those do not match as text.
    """

    def mark(text: str) -> str:
        token = special_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    match tool_format:
        case ToolFormat.HERMES:
            call = f'{mark("<tool_call>")} "\\n" call "\\n" {mark("</tool_call>")}'
            start = _repeated(call, '"\\n"', several=several)
        case ToolFormat.LLAMA:
            start = _repeated("call", '"; "', several=several)
        case ToolFormat.MISTRAL:
            calls = _repeated("call", '", "', several=several)
            start = f'{mark("[TOOL_CALLS]")} "[" {calls} "]"'
    lines = ["start: calls" if answer is None else "start: calls | answer", f"calls: {start}"]
    if answer is not None:
        lines.append(f"answer: {json_rule(answer)}")
    lines += [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name)}, "{tool_format.arguments}": '
        lines.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: {json_rule(tool.schema)}")
    return "\n".join(lines)


def json_rule(schema: str) -> str:
    """A Lark rule for JSON that follows a schema (the text of an object)."""
    parsed = json.loads(schema)
    if isinstance(parsed, dict):  # true and false are schemas, too
        parsed = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}} | parsed
    return f"%json {json.dumps(parsed, ensure_ascii=False)}"


def _repeated(item: str, between: str, *, several: bool) -> str:
    return f"{item} ({between} {item})*" if several else item
