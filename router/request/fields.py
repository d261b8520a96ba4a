"""Typed reading of a request's fields out of a mapping, as JSON or protobuf gave them.

Every reader returns None for a field that is absent or null, and raises InvalidRequest naming the
field when its type is wrong. Ranges are checked by whoever gives the values a meaning.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from protocol.errors import InvalidRequest

Fields = Mapping[str, Any]

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    array: "an array",
    dict: "an object",
    type(None): "null",
}
#: Integers beyond this cannot mean anything here and would not survive the wire.
_MAX_INT = 2**63 - 1
#: Templates and grammars walk through JSON by recursion.
MAX_DEPTH = 64


def wrong_type(param: str, expected: str, value: object) -> InvalidRequest:
    """The error of a field with a value of the wrong type."""
    found = _NAMES.get(type(value), type(value).__name__)
    return InvalidRequest(f"{param} must be {expected}, got {found}", param=param)


def boolean(fields: Fields, name: str) -> bool | None:
    """A boolean field."""
    return as_boolean(fields.get(name), name)


def as_boolean(value: object, param: str) -> bool | None:
    """`value` as a boolean, or null."""
    if value is None or isinstance(value, bool):
        return value
    raise wrong_type(param, "a boolean", value)


def integer(fields: Fields, name: str) -> int | None:
    """An integer field of at most 64 bits."""
    value = fields.get(name)
    return None if value is None else as_integer(value, name)


def as_integer(value: object, param: str) -> int:
    """`value` as an integer of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(param, "an integer", value)
    if abs(value) > _MAX_INT:
        raise InvalidRequest(f"{param} must fit 64 bits", param=param)
    return value


def number(fields: Fields, name: str) -> float | None:
    """A finite number field."""
    value = fields.get(name)
    return None if value is None else as_number(value, name)


def as_number(value: object, param: str) -> float:
    """`value` as a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(param, "a number", value)
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidRequest(f"{param} must be a finite number", param=param)
    return result


def text(fields: Fields, name: str) -> str | None:
    """A string field that is valid Unicode."""
    value = fields.get(name)
    return None if value is None else as_text(value, name)


def as_text(value: object, param: str) -> str:
    """`value` as a string without lone surrogates (they have no UTF-8 form)."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {error.reason}", param=param) from None
    return value


def as_array(value: object, param: str) -> list[Any]:
    """`value` as an array."""
    if are_ids(value):
        return list(value)
    if not isinstance(value, list):
        raise wrong_type(param, "an array", value)
    return value


def as_object(value: object, param: str) -> dict[str, Any]:
    """`value` as an object."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def check_count(items: Sized, most: int, param: str) -> None:
    """Raise InvalidRequest when there are more than `most` items: before anybody looks at each."""
    if len(items) > most:
        raise InvalidRequest(f"{param}: at most {most}, got {len(items)}", param=param)


def check_depth(value: object, param: str) -> None:
    """Raise InvalidRequest when a JSON value is nested deeper than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def are_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Whether this was read as nothing but integers: a long array, or a field of a message."""
    return isinstance(value, Sequence) and not isinstance(value, str | list)


def token_ids(value: object, param: str) -> Sequence[int]:
    """An array of integers. Whether they are in the vocabulary is checked later."""
    if are_ids(value):
        return value
    values = as_array(value, param)
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise wrong_type(param, "an array of integers", wrong)
    return tuple(values)
