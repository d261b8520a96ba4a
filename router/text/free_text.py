"""Grammars of free text within limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from llguidance import regex_to_lark

from grammar.bounds import check_regex
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind
from router.request.limited_text import LimitedText, Tag
from router.text.tool_grammar import json_rule

_ANY = "/(?s:.*)/"


def limited_grammar(
    text: LimitedText, special_ids: Mapping[str, int], end_ids: Iterable[int]
) -> Grammar:
    """The grammar of a text for a model with these special tokens, by their texts, and ends.

    Raises InvalidRequest, without the field's name.
    """
    if text.allowed_ids:
        source = _of_tokens(text.allowed_ids, end_ids)
    elif text.bad_words:
        words = " | ".join(map(_quoted, text.bad_words))
        source = f"start: TEXT\nTEXT: {_ANY} & ~({_ANY} ({words}) {_ANY})"
    else:
        source = "\n".join(_tagged(text, special_ids))
    return Grammar(kind=GrammarKind.LARK, source=source)


def _of_tokens(allowed: Iterable[int], end_ids: Iterable[int]) -> str:
    """Only these tokens. The text ends where the model ends it, if an end is among them: otherwise
    the grammar waits for an end that the masks of grammars never allow in its middle."""
    ids, ends = sorted(set(allowed)), sorted(end_ids)
    spans: list[list[int]] = []
    for token in ids:
        if spans and spans[-1][1] == token - 1:
            spans[-1][1] = token
        else:
            spans.append([token, token])
    listed = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
    wait = "" if set(ids) & set(ends) else f" <[{ends[0]}]>"
    return f"start: (<[{listed}]>)*{wait}"


def _tagged(text: LimitedText, special_ids: Mapping[str, int]) -> Iterator[str]:
    by_trigger: dict[str, list[int]] = {}
    for i, tag in enumerate(text.tags):
        by_trigger.setdefault(tag.trigger, []).append(i)
    if text.single:
        yield f"start: tagged {'' if text.required else '| TEXT'}"
    else:
        yield f"start: {'tagged ' if text.required else ''}tagged* TEXT"
    yield f"TEXT: {_ANY}"
    options = []
    for number, (trigger, tags) in enumerate(by_trigger.items()):
        head, *rest = _spelled(trigger, special_ids)
        if head.startswith("<"):
            head = f"TEXT {head}"
        else:
            yield f"head_{number}[lazy]: {_ANY} {head}"
            head = f"head_{number}"
        options.append(f"{head} {' '.join(rest)} ({' | '.join(f'tag_{i}' for i in tags)})")
    yield f"tagged: {' | '.join(options)}"
    for i, tag in enumerate(text.tags):
        begin = " ".join(_spelled(tag.begin.removeprefix(tag.trigger), special_ids))
        yield f"tag_{i}: {begin} {_content(tag)} {' '.join(_spelled(tag.end, special_ids))}"


def _content(tag: Tag) -> str:
    if tag.regex is not None:
        check_regex(tag.regex)
        return _hidden(f"/{regex_to_lark(tag.regex, 'd')}/")
    try:
        return _hidden(json_rule(tag.schema or "{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a JSON Schema: {error}") from None


def _spelled(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """A text in Lark's syntax, its special tokens as tokens: as text they would not match."""
    found = [(text.find(mark), -len(mark), mark) for mark in special_ids if mark and mark in text]
    if not found:
        return [_quoted(text)] if text else []
    at, _, mark = min(found)
    before = [_quoted(text[:at])] if at else []
    after = _spelled(text[at + len(mark) :], special_ids)
    return [*before, f"<[{special_ids[mark]}]>", *after]


def _quoted(text: str) -> str:
    return _hidden(json.dumps(text, ensure_ascii=False))


def _hidden(literal: str) -> str:
    """The same literal without the word that names the first rule (reasoning_grammar)."""
    return literal.replace("start", "star\\u0074")
