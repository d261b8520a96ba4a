"""Limits on a grammar's source.

The library bounds the work of one compilation and of one mask, but not well that of a long forced
text (`a{100}{100}{100}`): the time of every mask grows with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind

MAX_SOURCE_CHARS = 1 << 18
MAX_TEXT_CHARS = 1 << 12
#: Characters of a regular expression with its repetitions written out.
MAX_REGEX_CHARS = 10_000
MAX_DEPTH = 64
#: Between two parts of JSON: nothing, a space, or a line break with an indent. Without this limit
#: small models write line breaks until max_tokens.
JSON_WHITESPACE = r" |\n {0,16}"

#: A string or a regular expression in Lark; a bare slash belongs to a comment or to JSON. An open
#: one is read to the end of its line, so that no character is scanned twice.
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)++/?')
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
#: Lengths beyond this are all the same.
_ENDLESS = 1 << 40


def check_source(grammar: Grammar) -> None:
    """Raise InvalidRequest when a grammar is too large or malformed."""
    check_length(grammar)
    match grammar.kind:
        case GrammarKind.REGEX:
            check_regex(grammar.source)
        case GrammarKind.LARK:
            _check_lark(grammar.source)
        case GrammarKind.CHOICE:
            _check_choice(_parsed(grammar.source))
        case GrammarKind.JSON_SCHEMA:
            for key, value in _walk(_parsed(grammar.source), 0):
                _check_schema_text(key, value)


def check_length(grammar: Grammar) -> None:
    """Raise InvalidRequest when the source is too long to scan."""
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise InvalidRequest(
            f"a grammar has at most {MAX_SOURCE_CHARS} characters, got {len(grammar.source)}"
        )


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise InvalidRequest("nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"not valid JSON: {error}") from None


def _check_lark(source: str) -> None:
    """Limits literals and the sum of repetitions, not the number of rules."""
    for literal in _LITERAL.findall(source):
        if literal[0] == "/":
            check_regex(literal)
        else:
            _check_text(literal)
    _check_added(written_out(source) - len(source))


def _check_choice(choices: Any) -> None:
    if not isinstance(choices, list) or not choices:
        raise InvalidRequest("must be a non-empty array of strings")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest("must be an array of non-empty strings")
        _check_text(choice)


def _walk(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of a schema, and every item of its arrays under the array's key."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _walk(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield "", item
            yield from _walk(item, depth + 1)


def _check_schema_text(key: str, value: Any) -> None:
    _check_text(key)
    if isinstance(value, str):
        _check_text(value)
        if key == "pattern":
            check_regex(value)
    elif key == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            check_regex(pattern)


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"a string has at most {MAX_TEXT_CHARS} characters, got {len(text)}")


def check_regex(regex: str) -> None:
    """Raise InvalidRequest when a regular expression is too long or ends within an escape."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # the library would leave it out
        raise InvalidRequest("a regular expression ends with a backslash that escapes nothing")
    size = written_out(regex)
    if size > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"a regular expression has at most {MAX_REGEX_CHARS} characters with its repetitions "
            f"written out, this one has {size}"
        )


def _check_added(size: int) -> None:
    if size > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"repetitions may add at most {MAX_REGEX_CHARS} characters when they are written out, "
            f"these add {size}"
        )


def written_out(regex: str) -> int:
    """Approximate length of a regular expression with `{n}` and `{n,m}` written out: the item
    before a repetition (character, class, group, repetition) counts as often as it may occur."""
    groups: list[int] = []  # the length before each open group
    total = last = at = 0
    while at < len(regex):
        char = regex[at]
        repeat = _REPEAT.match(regex, at)
        if repeat is not None:
            digits = (repeat[2] or repeat[1] or "1").lstrip("0")
            times = max(1, int(digits[:12] or 1))
            total = min(_ENDLESS, total + last * (times - 1))
            last = min(_ENDLESS, last * times)
            at = repeat.end()
            continue
        step = 1
        if char == "(":
            groups.append(total)
        elif char == ")" and groups:
            last = total - groups.pop() + 1
            total += 1
        elif char not in "*+?|":
            step = _item_end(regex, at) - at
            last = step
            total += step
        at += step
    return total


def _item_end(regex: str, at: int) -> int:
    """Where the character, escape or class that begins at `at` ends."""
    if regex[at] == "\\":
        return min(len(regex), at + 2)
    if regex[at] != "[":
        return at + 1
    end = at + 1
    end += regex[end : end + 1] == "^"
    end += regex[end : end + 1] == "]"  # there it is an ordinary character
    while end < len(regex) and regex[end] != "]":
        end += 2 if regex[end] == "\\" else 1
    return min(len(regex), end + 1)
