"""Long JSON, written and parsed in slices, so that other streams go on meanwhile.

The interpreter's parsers hold its lock to the end, 10 ms a MB of numbers. Here long arrays of
integers, which make bodies of token ids large, are cut out and parsed some thousand characters at a
time, with the lock released in between. The rest is parsed in one call: texts, which take little
time, and structure, which is bounded.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn, TypeVar

import msgspec

from protocol.errors import InvalidRequest

R = TypeVar("R")

#: Tokens with log-probabilities that the event loop writes itself: a few milliseconds.
_MAX_ON_LOOP = 256
#: Items of a long array encoded by one call, which holds the interpreter's lock.
_SLICE = 64

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


#: They end no line of an event stream, but clients that split lines by their language's rules
#: (httpx's iter_lines) take them for line ends, so they are escaped.
_LINE_ENDS = "\x85\u2028\u2029"


def one_line(text: str) -> str:
    """JSON without characters that some clients take for line ends."""
    for char in _LINE_ENDS:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def server_event(fields: dict[str, Any], *, name: str) -> str:
    """A named server-sent event."""
    return f"event: {name}\ndata: {one_line(encode(fields))}\n\n"


async def off_loop(work: Callable[[], R], *, size: int) -> R:
    """`work()`, in a thread when it handles more than a few tokens."""
    return work() if size <= _MAX_ON_LOOP else await asyncio.to_thread(work)


def encode_in_pieces(value: Any) -> str:
    """As `encode`, with long arrays encoded slice by slice."""
    if isinstance(value, dict):
        fields = (f"{encode(name)}:{encode_in_pieces(item)}" for name, item in value.items())
        return "{" + ",".join(fields) + "}"
    if not isinstance(value, list | tuple):
        return encode(value)
    if len(value) <= _MAX_ON_LOOP:
        return "[" + ",".join(map(encode_in_pieces, value)) + "]"
    starts = range(0, len(value), _SLICE)
    return "[" + ",".join(encode(value[at : at + _SLICE])[1:-1] for at in starts) + "]"


#: Shorter arrays are parsed with the rest.
_MIN_ARRAY_CHARS = 1 << 12
#: Characters of an array that are parsed without a pause: less than a millisecond.
_SLICE_CHARS = 1 << 14
#: Characters outside texts and arrays of integers: 20 ms.
MAX_STRUCTURE = 2 << 20
_ID_FIELDS = frozenset({"prompt", "tokens"})


def loads_in_pieces(text: str) -> Any:
    """What json.loads gives, but long arrays of token ids are `array('q')`. Raises ValueError and
    RecursionError as it does, InvalidRequest over the bound on structure."""
    marker = secrets.token_hex(8)
    parts: list[str] = []
    arrays: list[array[int]] = []
    end = structure = 0
    for start, stop in _flat_arrays(text):
        found = _integers(text, start + 1, stop - 1)
        if found is None:
            structure += stop - start
            _check_structure(structure)
        else:
            parts += (text[end:start], f'{{"{marker}":{len(arrays)}}}')
            arrays.append(found)
            end = stop
    parts.append(text[end:])

    def put_back(value: dict[str, Any]) -> Any:
        return arrays[value[marker]] if marker in value else value

    rest, hook = "".join(parts), put_back if arrays else None
    value = json.loads(rest, parse_constant=refuse_constant, object_hook=hook)
    if not arrays:
        return value
    if not isinstance(value, dict):
        return _with_lists(value)
    return {n: item if n in _ID_FIELDS else _with_lists(item) for n, item in value.items()}


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads as JSON."""
    raise ValueError(f"{name} is not JSON")


def _with_lists(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, list):
        return [_with_lists(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return value


def _flat_arrays(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each long array that holds no texts, arrays or objects."""
    structure = at = 0
    while at < len(text):
        quote = text.find('"', at)
        stop = len(text) if quote < 0 else quote
        structure += stop - at + 2
        while (close := text.find("]", at, stop)) >= 0:
            begin = text.rfind("[", at, close)
            long = begin >= 0 and close - begin > _MIN_ARRAY_CHARS
            if long and text.find("{", begin, close) < 0:
                structure -= close - begin
                yield begin, close + 1
            at = close + 1
        _check_structure(structure)
        at = len(text) if quote < 0 else _end_of_text(text, quote)


def _check_structure(num_chars: int) -> None:
    if num_chars > MAX_STRUCTURE:
        raise InvalidRequest(
            f"the body has more than {MAX_STRUCTURE} characters of JSON beside its texts and "
            "arrays of integers"
        )


def _end_of_text(text: str, quote: int) -> int:
    end = text.find('"', quote + 1)
    if end >= 0 and text.find("\\", quote + 1, end) < 0:
        return end + 1
    behind: int = scanstring(text, quote + 1, True)[1]
    return behind


def _integers(text: str, start: int, stop: int) -> array[int] | None:
    """The integers between two places; None when they are not just integers of 64 bits."""
    found: array[int] = array("q")
    while start <= stop:
        end = text.find(",", min(start + _SLICE_CHARS, stop), stop)
        end = stop if end < 0 else end
        try:
            integers = _INTEGERS.decode(f"[{text[start:end]}]")
            found.extend(integers)
        except (msgspec.DecodeError, OverflowError):
            return None
        if not integers:  # nothing between two commas
            return None
        start = end + 1
        time.sleep(0)  # releases the interpreter's lock to threads that wait for it
    return found


_INTEGERS = msgspec.json.Decoder(list[int])
