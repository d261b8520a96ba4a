"""Parsing large JSON texts while other threads go on.

The interpreter's parser keeps its lock to the end, 10 ms a MB of numbers, and every stream waits.
Here arrays of integers, which make a body of token ids large, are cut out and parsed some thousand
characters at a time, the lock free between. The rest goes to the parser in one piece: texts, which
it reads quickly, and structure, of which there is a bound.
"""

from __future__ import annotations

import json
import secrets
import time
from array import array
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from protocol.errors import InvalidRequest

#: Arrays of fewer characters stay where they are.
_LONG = 1 << 12
#: Characters that are parsed without a pause: less than a millisecond.
_PIECE = 1 << 14
#: Characters that are neither in texts nor in arrays of integers: 20 ms.
MAX_STRUCTURE = 2 << 20
#: Where token ids are.
_IDS = frozenset({"prompt", "tokens"})


def loads_in_pieces(text: str) -> Any:
    """What json.loads gives, but long arrays of token ids are `array('q')`. Raises ValueError and
    RecursionError as it does, InvalidRequest over the bound on structure."""
    mark = secrets.token_hex(8)
    parts: list[str] = []
    arrays: list[array[int]] = []
    end = 0
    for start, stop in _flat_arrays(text):
        found = _integers(text, start + 1, stop - 1)
        if found is not None:
            parts += (text[end:start], f'{{"{mark}":{len(arrays)}}}')
            arrays.append(found)
            end = stop
    parts.append(text[end:])

    def put_back(value: dict[str, Any]) -> Any:
        return arrays[value[mark]] if mark in value else value

    rest = "".join(parts)
    if not arrays:
        return json.loads(rest, parse_constant=refuse_constant)
    value = json.loads(rest, parse_constant=refuse_constant, object_hook=put_back)
    if not isinstance(value, dict):
        return _plain(value)
    return {name: item if name in _IDS else _plain(item) for name, item in value.items()}


def _plain(value: Any) -> Any:
    """A value with lists for arrays."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity, which Python would read."""
    raise ValueError(f"{name} is not JSON")


def _flat_arrays(text: str) -> Iterator[tuple[int, int]]:
    """Where long arrays begin and end that hold neither texts nor arrays nor objects."""
    structure = at = 0
    while at < len(text):
        quote = text.find('"', at)
        stop = len(text) if quote < 0 else quote
        structure += stop - at + 2
        while (close := text.find("]", at, stop)) >= 0:
            begin = text.rfind("[", at, close)
            if close - begin > _LONG and begin >= 0 and text.find("{", begin, close) < 0:
                structure -= close - begin
                yield begin, close + 1
            at = close + 1
        if structure > MAX_STRUCTURE:
            raise InvalidRequest(
                f"the body has more than {MAX_STRUCTURE} characters of JSON beside its texts and "
                "arrays of integers"
            )
        at = len(text) if quote < 0 else _behind_text(text, quote)


def _behind_text(text: str, quote: int) -> int:
    end = text.find('"', quote + 1)
    if end >= 0 and text.find("\\", quote + 1, end) < 0:
        return end + 1
    behind: int = scanstring(text, quote + 1, True)[1]
    return behind


def _integers(text: str, start: int, stop: int) -> array[int] | None:
    """The integers between two places; None when they are not just integers of 64 bits."""
    found: array[int] = array("q")
    while start < stop:
        end = text.find(",", min(start + _PIECE, stop), stop)
        end = stop if end < 0 else end
        try:
            piece = json.loads(f"[{text[start:end]}]")
            if bool in set(map(type, piece)):
                return None
            found.extend(piece)
        except (ValueError, TypeError, OverflowError):
            return None
        start = end + 1
        time.sleep(0)  # whoever waits for the interpreter's lock has it now
    return found
