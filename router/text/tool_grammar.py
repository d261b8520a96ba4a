"""Grammars that enforce tool calls.

A forced call is JSON within the marks of its format, also where a model that is free writes
something else (QWEN_XML, PYTHONIC, GEMMA): so its arguments follow their schema in every detail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grammar.bounds import JSON_WHITESPACE
from router.request.tools import Function
from router.text.tool_formats import ToolFormat

#: The id of a text that is a special token.
SpecialId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What surrounds calls, in Lark's syntax: before the first, between two, behind the last. In
    `call` stand `NAME`, `"name"` in quotes, and `ARGUMENTS`."""

    before: str
    between: str
    behind: str
    call: str


_OBJECT = r'"{\"name\": \"" NAME "\", \"arguments\": " ARGUMENTS "}"'
_PARAMETERS = _OBJECT.replace("arguments", "parameters")
_TAGGED = _Frame(
    '<tool_call> "\\n"',
    '"\\n" </tool_call> "\\n" <tool_call> "\\n"',
    '"\\n" </tool_call>',
    _OBJECT,
)
_ANY_OBJECT = '{"type": "object"}'
_BARE = _Frame("", '"; "', "", _PARAMETERS)
_FIRST_DEEPSEEK = "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>"
_LAST_DEEPSEEK = "<｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
_NEXT_DEEPSEEK = "<｜tool▁call▁end｜> BREAK <｜tool▁call▁begin｜>"
#: Reasoning may come first.
_ANALYSIS = '(<|channel|> "analysis" <|message|> ANYTHING <|end|> <|start|> "assistant")?'
_FRAMES = {
    ToolFormat.HERMES: _TAGGED,
    ToolFormat.QWEN_XML: _TAGGED,
    ToolFormat.LLAMA: _BARE,
    ToolFormat.PYTHONIC: _BARE,
    ToolFormat.MISTRAL: _Frame('[TOOL_CALLS] "["', '", "', '"]"', _OBJECT),
    ToolFormat.MISTRAL_NAMED: _Frame("[TOOL_CALLS]", "[TOOL_CALLS]", "", "NAME [ARGS] ARGUMENTS"),
    ToolFormat.PHI4: _Frame('<|tool_call|> "["', '", "', '"]" <|/tool_call|>', _OBJECT),
    ToolFormat.GRANITE: _Frame('<|tool_call|> "["', '", "', '"]"', _OBJECT),
    ToolFormat.DEEPSEEK: _Frame(
        _FIRST_DEEPSEEK,
        _NEXT_DEEPSEEK.replace("BREAK", '"\\n"'),
        _LAST_DEEPSEEK,
        '"function" <｜tool▁sep｜> NAME "\\n```json\\n" ARGUMENTS "\\n```"',
    ),
    ToolFormat.DEEPSEEK_V31: _Frame(
        _FIRST_DEEPSEEK,
        _NEXT_DEEPSEEK.replace("BREAK ", ""),
        _LAST_DEEPSEEK,
        "NAME <｜tool▁sep｜> ARGUMENTS",
    ),
    ToolFormat.HARMONY: _Frame(
        _ANALYSIS,
        "",  # the model ends its turn with each call
        "",
        '<|channel|> "commentary to=functions." NAME " " '
        '<|constrain|> "json" <|message|> ARGUMENTS',
    ),
    ToolFormat.GEMMA: _Frame(
        "<start_function_call>",
        "<end_function_call> <start_function_call>",
        "<end_function_call>",
        _OBJECT,
    ),
}


#: Formats whose calls come up anywhere in a text, as JSON behind a mark.
WITHIN_TEXT = frozenset(
    {
        *(ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED, ToolFormat.PHI4),
        *(ToolFormat.GRANITE, ToolFormat.DEEPSEEK, ToolFormat.DEEPSEEK_V31),
    }
)


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Function],
    *,
    several: bool,
    in_text: bool = False,
    answer: str | None = None,
    thought: tuple[str, Sequence[str]] = ("", ()),
    special_id: SpecialId,
) -> str:
    """A grammar in Lark's syntax for one call of these tools, or `several`; with `answer`, for JSON
    of that schema instead of calls, too; `in_text`, for text that may end in calls, and of which
    only tools that are strict get arguments of their schema. `thought` comes before either: how
    rules refer to it, and its rules.

    `special_id` is the id of a text that is a special token: those do not match as text.
    """

    def marked(part: str) -> str:
        """A frame's part with every mark as a token or as text."""
        for mark in sorted(tool_format.marks, key=len, reverse=True):
            part = part.replace(mark, f"\0{mark_rule(mark, special_id)}\0")
        return part.replace("\0", "")

    frame = _FRAMES[tool_format]
    before = frame.before
    if before is _ANALYSIS and special_id("<|end|>") is None:
        before = ""  # nothing would tell where it ends
    calls = f"{marked(before)} call"
    if several and frame.between:
        calls += f" ({marked(frame.between)} call)*"
    calls += f" {marked(frame.behind)}"
    if in_text:
        lines = _behind_text(calls, thought[0])
    else:
        start = "calls" if answer is None else "(calls | answer)"
        lines = [f"start: {thought[0]} {start}", f"calls: {calls}"]
    lines += [
        *thought[1],
        f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
    ]
    if answer is not None:
        lines.append(f"answer: {json_rule(answer)}")
    if "ANYTHING" in before:
        lines.append(r"ANYTHING: /(?s:.*)/")
    for i, tool in enumerate(tools):
        body = marked(frame.call).replace("ARGUMENTS", f"arguments_{i}")
        lines.append(f"call_{i}: {body.replace('NAME', json.dumps(tool.name))}")
        schema = tool.schema if tool.strict or not in_text else _ANY_OBJECT
        lines.append(f"arguments_{i}: {json_rule(schema)}")
    return "\n".join(lines)


def _behind_text(calls: str, thought: str) -> list[str]:
    """The first rules of a grammar of text that may end in `calls`, whose first part is their
    mark."""
    mark, _, rest = calls.strip().partition(" ")
    text = "TEXT: /(?s:.*)/"
    if mark.startswith("<"):
        return [f"start: {thought} TEXT ({mark} {rest})?", text]
    return [f"start: {thought} (head {rest} | TEXT)", f"head[lazy]: /(?s:.*)/ {mark}", text]


def mark_rule(mark: str, special_id: SpecialId) -> str:
    """A mark in Lark's syntax: as a token where it is one, else as text."""
    token = special_id(mark)
    return json.dumps(mark, ensure_ascii=False) if token is None else f"<[{token}]>"


def json_rule(schema: str) -> str:
    """A Lark rule for JSON that follows a schema (the text of an object)."""
    parsed = json.loads(schema)
    if isinstance(parsed, dict):  # true and false are schemas, too
        parsed = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}} | parsed
    return f"%json {json.dumps(parsed, ensure_ascii=False)}"
