"""JSON Schemas as the library takes them.

A schema is rewritten only where the library refuses what asks for nothing, or lets more through
than the schema allows. What comes out follows the original.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from grammar.references import BY_NAME, DATA, resolve_references
from protocol.errors import InvalidRequest

#: Formats that the library enforces for strings; all others are annotations (JSON Schema 2020-12,
#: Validation, section 7.2).
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: Numbers by the keyword that has them.
Bounds = Mapping[str, list[float]]
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_BOUNDS = (*_LOWER_BOUNDS, "maximum", "exclusiveMaximum")
#: Beyond these the library has no numbers.
_MAX_INT, _MIN_INT, _MAX_FLOAT = 2**63 - 1, 1024 - 2**63, 9.0e18

#: All control characters but those with a short escape in JSON: \b \t \n \f \r.
_RARE = r"\x00-\x07\x0b\x0e-\x1f"
#: A string or a regular expression in Lark, or what comes before a schema.
_JSON_RULE = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)++/?|(%json\s*)(?=[{\[])')
_DECODER = json.JSONDecoder()


def for_library(schema: str) -> str:
    """The text of a schema as the library takes it.

    Raises InvalidRequest when a part of it only refers to itself.
    """
    return _document(json.loads(schema))


def lark_for_library(source: str) -> str:
    """A grammar in Lark's syntax with the schemas of its `%json` rules as the library takes them.

    Raises InvalidRequest for such a rule without valid JSON, and as `for_library`.
    """
    parts: list[str] = []
    at = 0
    while (found := _JSON_RULE.search(source, at)) is not None:
        parts.append(source[at : found.end()])
        at = found.end()
        if found[1] is not None:
            try:
                schema, at = _DECODER.raw_decode(source, at)
                parts.append(_document(schema))
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"%json: {error}") from None
    return "".join([*parts, source[at:]])


def _document(schema: Any) -> str:
    resolve_references(schema)
    parts = list(_objects(schema))
    bounds = {key: [p[key] for p in parts if _is_number(p.get(key))] for key in _BOUNDS}
    return json.dumps(_rewritten(schema, bounds), ensure_ascii=False)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All within a value, itself included."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from _objects(item)


def _rewritten(value: Any, bounds: Bounds) -> Any:
    """The same for a schema, or an array of schemas. `bounds`: all of their document."""
    if isinstance(value, list):
        return [_rewritten(item, bounds) for item in value]
    if not isinstance(value, dict):
        return value
    changed = {}
    for key, item in value.items():
        if key in BY_NAME and isinstance(item, dict):
            rename = without_rare if key == "patternProperties" else str
            changed[key] = {
                rename(name): _rewritten(schema, bounds) for name, schema in item.items()
            }
        elif not _asks_nothing(key, item):
            changed[key] = _keyword(key, item, bounds)
    _leave_out_whole(changed, bounds)
    return changed


def _leave_out_whole(schema: dict[str, Any], bounds: Bounds) -> None:
    """Move an exclusive bound that is a whole number by a billionth of the range of numbers where
    that may be within the next whole number: there the library lets the bound itself through. The
    other bound may be in any schema of the document, as schemas are joined."""
    for key, inner, sign in (
        ("exclusiveMinimum", "maximum", 1),
        ("exclusiveMaximum", "minimum", -1),
    ):
        bound = schema.get(key)
        if not _is_number(bound) or bound % 1 != 0:  # nor infinite, nor NaN
            continue
        first = bound * sign
        ends = (end * sign for end in bounds[inner] + bounds[f"exclusive{inner.capitalize()}"])
        end = min((end for end in ends if first < end < first + 1), default=None)
        if first >= 0 and end is not None:
            moved = max(first + (end - first) * 1e-9, math.nextafter(first, math.inf))
            schema[key] = sign * moved


def _asks_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key == "uniqueItems" and value is False


def _keyword(key: str, value: Any, bounds: Bounds) -> Any:
    if key in DATA:
        return value
    if key == "pattern" and isinstance(value, str):
        return without_rare(value)
    if key in _BOUNDS and _is_number(value):
        return _within(value, lower=key in _LOWER_BOUNDS)
    return _rewritten(value, bounds)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(bound: float, *, lower: bool) -> float:
    """A bound that the library has: the numbers it leaves out are beyond 2^63."""
    is_int = isinstance(bound, int)
    if lower:
        return bound if bound >= (_MIN_INT if is_int else -_MAX_FLOAT) else -int(_MAX_FLOAT)
    return bound if bound <= (_MAX_INT if is_int else _MAX_FLOAT) else int(_MAX_FLOAT)


def without_rare(pattern: str) -> str:
    """A regular expression whose classes leave rare control characters out.

    Where a class has all control characters, the library also lets the escapes of `"` and of the
    backslash through in JSON, whether the class has these or not.
    """
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            end = _class_end(pattern, at)
            if end is None:  # the library refuses it, in its own words
                return pattern
            parts.append(f"[{pattern[at:end]}&&[^{_RARE}]]")
        else:
            end = at + (2 if pattern[at] == "\\" else 1)
            parts.append(pattern[at:end])
        at = end
    return "".join(parts)


def _class_end(pattern: str, at: int) -> int | None:
    """Where the class that begins at `at` ends, classes within it included; None: nowhere."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        at += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            at += pattern.startswith("^", at)
            at += pattern.startswith("]", at)  # there it is an ordinary character
        elif char == "]":
            depth -= 1
            if not depth:
                return at
    return None
