"""One reader for each way to write calls: from the mark that begins it to the end of the call.

A reader raises NotACall while the text may still be none; once the sink has the name of a call, the
reader goes on to its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from router.text.call_input import CallInput, ObjectEnd, Reading, held
from router.text.call_values import gemma, is_text, pythonic, to_json, typed
from router.text.tool_formats import PYTHON_TAG, ToolFormat


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
        yield from _skip_object(source, depth=1)
        return
    source.at = start
    yield from _skip_object(source, depth=0)
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


def _object(source: CallInput, sink: CallSink) -> Reading[None]:
    """Arguments that are a JSON object, passed on as they come."""
    end = ObjectEnd()
    while True:
        text = yield from source.rest()
        length = end.find(text)
        source.at += len(text) if length is None else length
        sink.arguments(text[:length])
        source.drop()
        if length is not None:
            sink.end()
            return


def _skip_object(source: CallInput, *, depth: int) -> Reading[None]:
    end = ObjectEnd(depth)
    while True:
        text = yield from source.rest()
        length = end.find(text)
        source.at += len(text) if length is None else length
        if length is not None:
            return


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


def _json_calls(source: CallInput, sink: CallSink, *, between: str) -> Reading[None]:
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


def _read_hermes(source: CallInput, sink: CallSink) -> Reading[None]:
    yield from read_json_call(source, sink)
    yield from source.before("</tool_call>")


def _read_array(source: CallInput, sink: CallSink) -> Reading[None]:
    yield from _json_calls(source, sink, between=",")


def _read_mistral(source: CallInput, sink: CallSink) -> Reading[None]:
    """An array of calls, or a name, perhaps an id, and the arguments."""
    yield from source.spaces()
    if (yield from source.char()) == "[":
        yield from _json_calls(source, sink, between=",")
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


def _read_deepseek(source: CallInput, sink: CallSink) -> Reading[None]:
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


def _read_harmony(source: CallInput, sink: CallSink) -> Reading[None]:
    """The header of a message: it names the function that is called, if any, and is no text."""
    header, _ = yield from source.before("<|message|>")
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        source.drop()
        return
    yield from source.spaces()
    yield from _named_object(source, sink, recipient[1])


def _read_whole_text(source: CallInput, sink: CallSink) -> Reading[None]:
    """Calls in JSON, or a list of calls as in Python."""
    for tag in (PYTHON_TAG, "<|python_start|>"):
        yield from source.spaces()
        yield from source.literal(tag)
    yield from source.spaces()
    start = source.at
    first = yield from source.char()
    if first == "[":
        source.at += 1
        yield from source.spaces()
        if (yield from source.char()) != "{":
            yield from _python_calls(source, sink)
            return
    elif first != "{":
        raise NotACall
    source.at = start
    yield from _json_calls(source, sink, between=";")


# --- calls in other notations ---------------------------------------------------------------------


class _Members:
    """Writes arguments as the members of a JSON object."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._separator = ""
        sink.arguments("{")

    def key(self, key: str) -> None:
        self._sink.arguments(f"{self._separator}{to_json(key)}: ")
        self._separator = ", "

    def add(self, key: str, value: object) -> None:
        self.key(key)
        self._sink.arguments(to_json(value))

    def end(self) -> None:
        self._sink.arguments("}")
        self._sink.end()


def _python_calls(source: CallInput, sink: CallSink) -> Reading[None]:
    """`name(key=value, ...), ...]`."""
    while True:
        yield from source.spaces()
        name = yield from source.word("_-.")
        if not (yield from source.literal("(")):
            raise NotACall
        sink.begin(name)
        yield from _python_arguments(source, sink, list(sink.properties(name)))
        source.drop()
        yield from source.spaces()
        if not (yield from source.literal(",")):
            break
        source.drop()
    yield from source.literal("]")


def _python_arguments(source: CallInput, sink: CallSink, names: list[str]) -> Reading[None]:
    """Arguments up to the closing parenthesis; those without a key have the names in order."""
    members = _Members(sink)
    names = names[::-1]
    while True:
        source.drop()
        yield from source.spaces()
        if (yield from source.literal(")")):
            members.end()
            return
        key = yield from source.word()
        yield from source.spaces()
        if key and (yield from source.literal("=")):
            value = yield from _value(source, ")")
            names = [name for name in names if name != key]
        else:
            source.at = 0
            value, key = (yield from _value(source, ")")), names.pop() if names else ""
        if key:
            members.add(key, pythonic(value))
        yield from source.literal(",")


def _value(source: CallInput, end: str) -> Reading[str]:
    """The text of a value, up to a comma or `end` outside of its brackets and strings."""
    start, depth, quote = source.at, 0, ""
    while True:
        char = yield from source.char()
        if quote:
            if char == "\\":
                source.at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif depth == 0 and char in ("," + end):
            return source.text[start : source.at]
        else:
            depth += (char in "([{") - (char in ")]}")
        source.at += 1


def _read_xml(source: CallInput, sink: CallSink) -> Reading[None]:
    yield from source.spaces()
    if (yield from source.char()) == "{":
        yield from _read_hermes(source, sink)
    elif (yield from source.literal("<function=")):
        yield from _read_function(source, sink)
    else:
        raise NotACall


def _read_function(source: CallInput, sink: CallSink) -> Reading[None]:
    """`name>`, parameters, `</function>`, perhaps `</tool_call>`."""
    name = yield from source.word("_-.")
    if not (yield from source.literal(">")):
        raise NotACall
    sink.begin(name)
    properties, members = sink.properties(name), _Members(sink)
    while True:
        _, end = yield from source.before("<parameter=", "</function>", "</tool_call>")
        source.drop()
        if end != "<parameter=":
            break
        key, _ = yield from source.before(">")
        members.key(key.strip())
        yield from _xml_value(source, sink, properties.get(key.strip()))
    members.end()
    if end == "</function>":
        yield from source.spaces()
        yield from source.literal("</tool_call>")


_CLOSE = "</parameter>"


def _xml_value(source: CallInput, sink: CallSink, schema: object) -> Reading[None]:
    """A parameter's value, without the line breaks around it; strings as they come."""
    yield from source.literal("\n")
    source.drop()
    if not is_text(schema):
        value, _ = yield from source.before(_CLOSE)
        sink.arguments(to_json(typed(value.removesuffix("\n"), schema)))
        source.drop()
        return
    sink.arguments('"')
    while (end := source.text.find(_CLOSE)) < 0:
        sure = len(source.text) - max(held(source.text, mark) for mark in (_CLOSE, "\n" + _CLOSE))
        sink.arguments(to_json(source.text[:sure])[1:-1])
        source.at = sure
        source.drop()
        yield from source.more()
    sink.arguments(to_json(source.text[:end].removesuffix("\n"))[1:-1] + '"')
    source.at = end + len(_CLOSE)
    source.drop()


def _read_gemma(source: CallInput, sink: CallSink) -> Reading[None]:
    """`call:name{key:value,...}`."""
    yield from source.spaces()
    if (yield from source.char()) == "{":
        yield from read_json_call(source, sink)
    else:
        if not (yield from source.literal("call:")):
            raise NotACall
        name = yield from source.word("_-.")
        if not (yield from source.literal("{")):
            raise NotACall
        sink.begin(name)
        yield from _gemma_arguments(source, sink)
    yield from source.before("<end_function_call>")


def _gemma_arguments(source: CallInput, sink: CallSink) -> Reading[None]:
    members = _Members(sink)
    while True:
        source.drop()
        yield from source.spaces()
        if (yield from source.literal("}")):
            members.end()
            return
        if (yield from source.literal(",")):
            continue
        key, _ = yield from source.before(":")
        value = yield from _gemma_value(source)
        members.add(key.replace("<escape>", "").strip(), gemma(value))


def _gemma_value(source: CallInput) -> Reading[str]:
    start, depth = source.at, 0
    while True:
        if (yield from source.literal("<escape>")):
            yield from source.before("<escape>")
            continue
        char = yield from source.char()
        if depth == 0 and char in ",}":
            return source.text[start : source.at]
        depth += (char in "[{") - (char in "]}")
        source.at += 1


_READERS: dict[ToolFormat, Reader] = {
    ToolFormat.HERMES: _read_hermes,
    ToolFormat.QWEN_XML: _read_xml,
    ToolFormat.LLAMA: _read_whole_text,
    ToolFormat.PYTHONIC: _read_whole_text,
    ToolFormat.MISTRAL: _read_mistral,
    ToolFormat.MISTRAL_NAMED: _read_mistral,
    ToolFormat.PHI4: _read_array,
    ToolFormat.GRANITE: _read_array,
    ToolFormat.DEEPSEEK: _read_deepseek,
    ToolFormat.DEEPSEEK_V31: _read_deepseek,
    ToolFormat.HARMONY: _read_harmony,
    ToolFormat.GEMMA: _read_gemma,
}


def reader_of(tool_format: ToolFormat, begin: str) -> Reader:
    """The reader of what follows the mark `begin`."""
    return _read_function if begin == "<function=" else _READERS[tool_format]
