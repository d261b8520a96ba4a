"""References within a JSON Schema.

No text has the form of a schema that only refers to itself: the library compiles it, and finds no
way on where an output has come to it. So such schemas are found before. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from protocol.errors import InvalidRequest

#: Keywords whose value is data, not a schema.
DATA = frozenset({"const", "enum", "default", "example", "examples", "required"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
#: Keywords whose value has schemas by names that clients choose.
BY_NAME = _DEFINITIONS | {"properties", "patternProperties", "dependentSchemas", "dependencies"}
_MAX_DIGITS = 9


def check_references(document: Any) -> None:
    """Raise InvalidRequest when an output may come to a schema that only refers to itself."""
    targets: dict[str, Any] = {}
    stuck = {id(schema): schema for schema in _reached(document, targets)}
    before = 0
    while len(stuck) != before:
        before = len(stuck)
        for key, schema in reversed(list(stuck.items())):  # most refer to what was found later
            if _begins(schema, targets, stuck):
                del stuck[key]
    for schema in stuck.values():
        if "$ref" in schema:
            raise InvalidRequest(f"{schema['$ref']} only leads to itself: no text has this form")


def _begins(schema: dict[str, Any], targets: dict[str, Any], stuck: Mapping[int, object]) -> bool:
    """Whether its first character can be written, going by the schemas that are not `stuck`."""

    def begins(other: Any) -> bool:
        return id(other) not in stuck

    ways = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    parts = schema.get("allOf")
    return (
        begins(targets.get(str(schema.get("$ref"))))
        and all(map(begins, parts if isinstance(parts, list) else ()))
        and all(any(map(begins, each)) for each in ways if each)
    )


def _reached(document: Any, targets: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that an output may come to. Adds to `targets` what references refer to."""
    seen: set[int] = set()
    stack = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        if not isinstance(value, dict) or id(value) in seen:
            continue
        if "$id" in value and value is not document:  # its references are to within it
            continue
        seen.add(id(value))
        yield value
        for key, item in value.items():
            if key in BY_NAME and isinstance(item, dict):
                stack += () if key in _DEFINITIONS else item.values()
            elif key not in DATA:
                stack.append(item)
        ref = value.get("$ref")
        if isinstance(ref, str):
            if ref not in targets:
                targets[ref] = _target(document, ref)
            stack.append(targets[ref])


def _target(document: Any, ref: str) -> Any:
    """What a reference refers to; None when that is not within the document, and when it is a name:
    the library looks for these."""
    if isinstance(document, dict) and isinstance(document.get("$id"), str):
        ref = ref.removeprefix(document["$id"].rstrip("#"))
    if not ref.startswith("#/"):
        return document if ref == "#" else None
    at = document
    for part in unquote(ref[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and len(name) <= _MAX_DIGITS:
            at = dict(enumerate(at)).get(int(name))
        elif isinstance(at, dict):
            at = at.get(name)
        else:
            return None
    return at
