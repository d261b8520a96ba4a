"""Readers of calls that are not, or not always, JSON; and which reader a format has."""

from __future__ import annotations

from router.text.call_input import CallInput, Reading, held
from router.text.call_readers import (
    CallSink,
    NotACall,
    Reader,
    json_calls,
    read_array,
    read_deepseek,
    read_harmony,
    read_hermes,
    read_json_call,
    read_mistral,
)
from router.text.call_values import gemma, is_text, pythonic, to_json, typed
from router.text.tool_formats import PYTHON_TAG, ToolFormat


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
    yield from json_calls(source, sink, between=";")


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
        yield from read_hermes(source, sink)
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
    ToolFormat.HERMES: read_hermes,
    ToolFormat.QWEN_XML: _read_xml,
    ToolFormat.LLAMA: _read_whole_text,
    ToolFormat.PYTHONIC: _read_whole_text,
    ToolFormat.MISTRAL: read_mistral,
    ToolFormat.MISTRAL_NAMED: read_mistral,
    ToolFormat.PHI4: read_array,
    ToolFormat.GRANITE: read_array,
    ToolFormat.DEEPSEEK: read_deepseek,
    ToolFormat.DEEPSEEK_V31: read_deepseek,
    ToolFormat.HARMONY: read_harmony,
    ToolFormat.GEMMA: _read_gemma,
}


def reader_of(tool_format: ToolFormat, begin: str) -> Reader:
    """The reader of what follows the mark `begin`."""
    return _read_function if begin == "<function=" else _READERS[tool_format]
