"""References within a JSON Schema.

They may name a schema by the way to it, by its anchor, or by a URL that is relative to the `$id`
around them. The library takes the way only as it should: behind a reference it forgets that `$id`.
So every reference is rewritten to the way from the top of the document.

No text has the form of a schema that only refers to itself: the library compiles it, and finds no
way on where an output has come to it. So such schemas are found before. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from protocol.errors import InvalidRequest

#: Keywords whose value is data, not a schema.
DATA = frozenset({"const", "enum", "default", "example", "examples", "required"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
#: Keywords whose value has schemas by names that clients choose.
BY_NAME = _DEFINITIONS | {"properties", "patternProperties", "dependentSchemas", "dependencies"}
_MAX_DIGITS = 9
#: The URL of a document without `$id`, as the library has it.
_URL = "json-schema:///"
#: Drafts in which nothing beside `$ref` counts.
_REF_ALONE = ("draft-04", "draft-06", "draft-07")
_MAX_REWRITTEN = 1 << 18
#: A way that leads nowhere, so that the library does not look for a file.
_NOWHERE = "#/$ref/$ref"

#: The key or index of a value within a document, behind the place of what has it; None: the top.
_Place = tuple["_Place", str] | None


def resolve_references(document: Any) -> None:
    """Rewrite the references of a document to ways from its top, and take every `$id` out of it.

    Raises InvalidRequest when an output may come to a reference to nothing in the document, or to a
    schema that only refers to itself.
    """
    _check_circles(document, _rewrite(document))


def _rewrite(document: Any) -> dict[int, str]:
    """The references as they were, by the identity of the schemas that have them."""
    dialect = str(document.get("$schema")) if isinstance(document, dict) else ""
    places: dict[str, _Place] = {_URL: None}
    found: list[tuple[dict[str, Any], str]] = []
    stack: list[tuple[Any, str, _Place]] = [(document, _URL, None)]
    while stack:
        value, base, place = stack.pop()
        if isinstance(value, list):
            stack += ((item, base, (place, str(index))) for index, item in enumerate(value))
        if not isinstance(value, dict):
            continue
        if (name := _taken_id(value, dialect)) is not None:
            url = _joined(base, name)
            base = url.partition("#")[0]
            places.setdefault(url, place)
        for key in ("$anchor", "$dynamicAnchor"):
            places.setdefault(f"{base}#{value.get(key)}", place)
        if isinstance(value.get("$ref"), str):
            found.append((value, base))
        for key, item in value.items():
            if key in BY_NAME and isinstance(item, dict):
                here = (place, key)
                stack += ((schema, base, (here, name)) for name, schema in item.items())
            elif key not in DATA:
                stack.append((item, base, (place, key)))
    return _replace(found, places)


def _taken_id(schema: dict[str, Any], dialect: str) -> str | None:
    """Take the name of a schema out of it; None when it has none that counts."""
    key = "id" if "draft-04" in dialect else "$id"
    if not isinstance(schema.get(key), str):
        return None
    name: str = schema.pop(key)
    return None if "$ref" in schema and any(each in dialect for each in _REF_ALONE) else name


def _replace(
    found: list[tuple[dict[str, Any], str]], places: Mapping[str, _Place]
) -> dict[int, str]:
    """Write the ways into schemas, each with the URL around it."""
    written, num_chars = {}, 0
    for schema, base in found:
        ref = written[id(schema)] = schema["$ref"]
        url, _, fragment = _joined(base, ref).partition("#")
        if fragment.startswith("/") and url in places:
            target = _way(places[url]) + quote(unquote(fragment), safe="/$~")
        elif (named := f"{url}#{unquote(fragment)}" if fragment else url) in places:
            target = _way(places[named])
        else:
            target = _NOWHERE
        if target != ref:
            schema["$ref"] = target
            num_chars += len(target)
            if num_chars > _MAX_REWRITTEN:
                raise InvalidRequest("$ref: the ways to what is referred to are too long")
    return written


def _joined(base: str, reference: str) -> str:
    """The URL of a reference, without an empty fragment."""
    if reference.startswith("#"):
        return base + (reference if len(reference) > 1 else "")
    try:
        return urljoin(base, reference).removesuffix("#")
    except ValueError:  # no URL at all
        return reference


def _way(place: _Place) -> str:
    parts: list[str] = []
    while place is not None:
        place, part = place
        parts.append(quote(part.replace("~", "~0").replace("/", "~1"), safe="$~"))
    return "/".join(["#", *reversed(parts)])


def _check_circles(document: Any, written: Mapping[int, str]) -> None:
    targets: dict[str, Any] = {}
    stuck = {id(schema): schema for schema in _reached(document, targets)}
    for schema in stuck.values():
        if schema.get("$ref") == _NOWHERE:
            ref = written.get(id(schema), _NOWHERE)
            raise InvalidRequest(f"{ref} refers to nothing within the schema")
    before = 0
    while len(stuck) != before:
        before = len(stuck)
        for key, schema in reversed(list(stuck.items())):  # most refer to what was found later
            if _begins(schema, targets, stuck):
                del stuck[key]
    for schema in stuck.values():
        if "$ref" in schema:
            ref = written.get(id(schema), schema["$ref"])
            raise InvalidRequest(f"{ref} only leads to itself: no text has this form")


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
    """What a reference refers to; None when that is not within the document."""
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
