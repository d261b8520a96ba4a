"""Readers of calls in JSON: from the mark that begins a call to its end (others: call_notations).

A reader raises NotACall while the text may still be none; once the sink has the name of a call, the
reader goes on to its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from router.text.call_input import CallInput, ObjectEnd, Reading
from router.text.call_values import to_json


class NotACall(Exception):
    """What looked like a call is text."""


class CallSink(Protocol):
    """Where calls go."""

    def begin(self, name: str) -> None:
        """A call of this function; what is read of it is dropped. Raises NotACall for an unknown
        function, StopReading when no more calls count."""

    def arguments(self, text: str) -> None:
        """More of its arguments, in JSON."""

    def end(self) -> None:
        """Its arguments are complete."""

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters, in order."""


Reader = Callable[[CallInput, CallSink], Reading[None]]


# --- calls in JSON --------------------------------------------------------------------------------


def read_json_call(source: CallInput, sink: CallSink) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`; with another order of keys it is read as a whole."""
    yield from source.spaces()
    start = source.at
    if not (yield from source.literal("{")):
        raise NotACall
    name = yield from _head(source)
    if name is not None:
        sink.begin(name)
        yield from _object(source, sink)
        yield from _object(source, depth=1)
        return
    source.at = start
    yield from _object(source)
    call = _whole_call(source.text[start : source.at])
    if call is None:
        raise NotACall
    sink.begin(call[0])
    sink.arguments(call[1])
    sink.end()


def _head(source: CallInput) -> Reading[str | None]:
    """The name of a call whose arguments, an object, follow; None when it is written otherwise."""
    yield from source.spaces()
    if not (yield from source.literal('"name"')):
        return None
    if not (yield from _punctuation(source, ":")):
        return None
    name = yield from source.quoted()
    if name is None or not (yield from _punctuation(source, ",")):
        return None
    key = yield from source.quoted()
    if key not in ('"arguments"', '"parameters"') or not (yield from _punctuation(source, ":")):
        return None
    return _text_of(name) if (yield from source.char()) == "{" else None


def _punctuation(source: CallInput, mark: str) -> Reading[bool]:
    yield from source.spaces()
    found = yield from source.literal(mark)
    yield from source.spaces()
    return found


def _object(source: CallInput, sink: CallSink | None = None, *, depth: int = 0) -> Reading[None]:
    """A JSON object of which `depth` levels are read: arguments, passed on to `sink` as they come;
    skipped without."""
    end = ObjectEnd(depth)
    length = None
    while length is None:
        text = yield from source.rest()
        length = end.find(text)
        source.at += len(text) if length is None else length
        if sink is not None:
            sink.arguments(text[:length])
            source.drop()
    if sink is not None:
        sink.end()


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call; None when it is not one."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, to_json(arguments)


def _text_of(quoted: str) -> str:
    r"""The value of a JSON string; empty when it is invalid (`"get\_weather"`)."""
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def json_calls(source: CallInput, sink: CallSink, *, between: str) -> Reading[None]:
    """One call, an array of them, or several with `between` between them."""
    yield from source.spaces()
    array = yield from source.literal("[")
    while True:
        yield from read_json_call(source, sink)
        source.drop()
        yield from source.spaces()
        if not (yield from source.literal("," if array else between)):
            break
        source.drop()
    if array:
        yield from source.literal("]")


def read_hermes(source: CallInput, sink: CallSink) -> Reading[None]:
    yield from read_json_call(source, sink)
    yield from source.before("</tool_call>")


def read_array(source: CallInput, sink: CallSink) -> Reading[None]:
    yield from json_calls(source, sink, between=",")


def read_mistral(source: CallInput, sink: CallSink) -> Reading[None]:
    """An array of calls, or a name, perhaps an id, and the arguments."""
    yield from source.spaces()
    if (yield from source.char()) == "[":
        yield from json_calls(source, sink, between=",")
        return
    name = yield from source.word()
    yield from source.spaces()
    if (yield from source.literal("[CALL_ID]")):
        yield from source.spaces()
        yield from source.word()
        yield from source.spaces()
    if (yield from source.literal("[ARGS]")):
        yield from source.spaces()
    yield from _named_object(source, sink, name)


def _named_object(source: CallInput, sink: CallSink, name: str) -> Reading[None]:
    if (yield from source.char()) != "{":
        raise NotACall
    sink.begin(name)
    yield from _object(source, sink)


def read_deepseek(source: CallInput, sink: CallSink) -> Reading[None]:
    """`function<sep>name`, a line break and a fence around JSON; or `name<sep>` and JSON."""
    yield from source.spaces()
    name = yield from source.word("_-.")
    if not (yield from source.literal("<｜tool▁sep｜>")):
        raise NotACall
    yield from source.spaces()
    if name == "function" and (yield from source.char()) != "{":
        name = yield from source.word("_-.")
        yield from source.spaces()
    if (yield from source.literal("```json")):
        yield from source.spaces()
    yield from _named_object(source, sink, name)
    yield from source.before("<｜tool▁call▁end｜>")


_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def read_harmony(source: CallInput, sink: CallSink) -> Reading[None]:
    """The header of a message: it names the function that is called, if any, and is no text."""
    header, _ = yield from source.before("<|message|>")
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        source.drop()
        return
    yield from source.spaces()
    yield from _named_object(source, sink, recipient[1])
