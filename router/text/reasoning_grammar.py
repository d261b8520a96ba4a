"""Grammars of an answer that comes after a thought: the thought is free, the answer is not."""

from __future__ import annotations

import json
import re

from llguidance import regex_to_lark

from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind
from router.text.reasoning import Reasoning, ReasoningFormat, Thinking
from router.text.tool_grammar import SpecialId, json_rule, mark_rule

_START = re.compile(r"\bstart\b")


def thought_rules(
    reasoning: Reasoning, thinking: Thinking, special_id: SpecialId, *, calls: bool = False
) -> tuple[str, list[str]]:
    """What comes before an answer or `calls`, in Lark's syntax: how it is referred to (empty:
    nothing comes), and its rules. `special_id` is the id of a text that is a special token."""
    if reasoning.format is ReasoningFormat.HARMONY:
        return ("", []) if calls else _channels(special_id)
    if reasoning.format is ReasoningFormat.NONE or thinking is Thinking.AFTER:
        return "", []
    begin, end = (mark_rule(mark, special_id) for mark in reasoning.format.marks)
    lines = [r"GAP: /\n{0,4}/"]
    if special_id(reasoning.format.marks[1]) is not None:
        lines += [r"FREE: /(?s:.*)/", f"rest_of_thought: FREE {end} GAP"]
    else:
        lines += [f"free[suffix={end}]: /(?s:.*)/", "rest_of_thought: free GAP"]
    if thinking is Thinking.INSIDE:
        return "rest_of_thought", lines
    return "thought?", [*lines, f"thought: {begin} rest_of_thought"]


def _channels(special_id: SpecialId) -> tuple[str, list[str]]:
    """gpt-oss answers in its channel `final`."""
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    if any(special_id(name) is None for name in names):
        return "", []  # nothing would tell where a message ends
    channel, message, end, start = (mark_rule(name, special_id) for name in names)
    thought = f'{channel} "analysis" {message} FREE {end} {start} "assistant"'
    lines = [r"FREE: /(?s:.*)/", f"thought: {thought}", f'opening: {channel} "final" {message}']
    return "thought? opening", lines


def after_thought(grammar: Grammar, before: str, rules: list[str], param: str) -> Grammar:
    """The grammar of an answer in this form behind `before`. Raises InvalidRequest naming the
    field when a grammar cannot be put behind anything."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            answer = f"answer: {json_rule(grammar.source)}"
        case GrammarKind.REGEX:
            # \d is 0-9 here as without a thought (grammar.compiler).
            answer = f"answer: /{regex_to_lark(grammar.source, 'd')}/"
        case GrammarKind.CHOICE:
            choices = (json.dumps(c, ensure_ascii=False) for c in json.loads(grammar.source))
            answer = f"answer: CHOICE\nCHOICE: {' | '.join(choices)}"  # as without a thought
        case GrammarKind.LARK:
            if len(_START.findall(grammar.source)) != 1:
                raise InvalidRequest(
                    f"{param}: behind a thought, `start` may stand only where it is defined",
                    param=param,
                )
            answer = _START.sub("answer", grammar.source)
    lines = [f"start: {before} answer", *rules, answer]
    return Grammar(kind=GrammarKind.LARK, source="\n".join(lines))
