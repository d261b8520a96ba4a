"""Argument values that models do not write as JSON."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

_ESCAPE = "<escape>"


def to_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, which only an escape can say
        return json.dumps(value)
    return text


def is_text(schema: object) -> bool:
    """Whether a parameter is a string, or may be anything."""
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    options = [schema.get("enum"), schema.get("const")]
    if any(option is not None for option in options):
        return all(isinstance(one, str) for one in options[0] or [options[1]])
    return kind is None and not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref"))


def typed(text: str, schema: object) -> Any:
    """The value that a text stands for, as an argument of this schema."""
    if is_text(schema):
        return text
    value = _literal(text.strip())
    return text if value is _NO_LITERAL else value


def pythonic(text: str) -> Any:
    """The value of a Python expression; the text itself when it is no literal."""
    value = _literal(text.strip())
    return text.strip() if value is _NO_LITERAL else value


_NO_LITERAL = object()


def _literal(text: str) -> Any:
    """A JSON value or a Python literal."""
    for read in (json.loads, _evaluated):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)  # complex numbers, bytes, sets, Infinity
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return value
    return _NO_LITERAL


def _evaluated(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escapes
        return ast.literal_eval(text)


def gemma(text: str) -> Any:
    """A value as Gemma writes it: strings between `<escape>` marks, keys without quotes."""
    try:
        value, _ = _gemma(text.strip(), 0)
    except (ValueError, IndexError, RecursionError):
        return text.strip()
    return value


def _gemma(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises ValueError or IndexError."""
    if text.startswith(_ESCAPE, at):
        start = at + len(_ESCAPE)
        end = text.index(_ESCAPE, start)
        return text[start:end], end + len(_ESCAPE)
    if text[at] not in "{[":
        end = min((i for i in (text.find(c, at) for c in ",}]") if i >= 0), default=len(text))
        return pythonic(text[at:end]), end
    items: dict[str, Any] | list[Any] = {} if text[at] == "{" else []
    close = "}" if text[at] == "{" else "]"
    at += 1
    while text[at] != close:
        if isinstance(items, dict):
            colon = text.index(":", at)
            key = text[at:colon].replace(_ESCAPE, "").strip()
            items[key], at = _gemma(text, colon + 1)
        else:
            item, at = _gemma(text, at)
            items.append(item)
        if text[at] == ",":
            at += 1
        elif text[at] != close:
            raise ValueError("neither a comma nor the end")
    return items, at + 1
