"""Forced calls are read back as calls of the tools that follow their schemas, in every format."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from grammar.compiler import Compiler
from grammar.matcher import compute_masks
from grammar.vocabulary import byte_vocabulary
from protocol.sampling import Grammar, GrammarKind
from router.request.tools import Function
from router.text.tool_formats import ToolFormat
from router.text.tool_grammar import call_grammar
from router.text.tool_parser import CallParser

END = 0
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": '^[^"<]{1,4}$'},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "set-mode": {
        "type": "object",
        "properties": {"mode": {"enum": ["a", "b", None]}},
        "required": ["mode"],
        "additionalProperties": False,
    },
}
SCHEMAS["start_NAME-of_ARGUMENTS_1"] = SCHEMAS["set-mode"]  # words of the grammar
TOOLS = [Function(name=name, parameters=schema) for name, schema in SCHEMAS.items()]


def written(tool_format: ToolFormat, seed: int, *, special: bool, several: bool) -> str:
    """A text that a model could write under the grammar, its marks special tokens or not."""
    names = {END: "<end>"}
    if special:
        names |= dict(enumerate(tool_format.marks, start=1))
    ids = {mark: i for i, mark in names.items()}
    vocabulary = byte_vocabulary(names)
    source = call_grammar(tool_format, TOOLS, several=several, special_id=ids.get)
    matcher = Compiler(vocabulary).start(Grammar(kind=GrammarKind.LARK, source=source), ends=[END])
    draw, text = random.Random(seed), b""
    for step in range(2000):
        bits = int.from_bytes(matcher.mask or b"", "little")
        allowed = [i for i in range(vocabulary.vocab_size) if bits >> i & 1]
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return text.decode()
        if len(allowed) > 100:  # free text: printable, and not for ever
            allowed = [
                i for i in allowed if i in names or 97 <= vocabulary.decode_bytes([i])[0] < 123
            ]
            marks = [i for i in allowed if i in names and i != END]
            allowed = marks if marks and draw.random() < 0.3 else allowed
        token = draw.choice([i for i in allowed if i != END])
        text += names[token].encode() if token in names else vocabulary.decode_bytes([token])
        matcher.take([token])
        compute_masks([matcher])
        assert not matcher.error, (step, text)
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("tool_format", ToolFormat)
def test_what_the_grammar_allows_is_read_as_calls(tool_format: ToolFormat, special: bool) -> None:
    properties = {tool.name: tool.properties for tool in TOOLS}
    seen = set()
    for seed in range(6):
        text = written(tool_format, seed, special=special, several=seed > 1)
        parser = CallParser(tool_format, properties, forced=True)
        calls: list[list[str]] = []
        for i, char in enumerate(text):
            plain, deltas = parser.push(char, last=i == len(text) - 1)
            assert plain == "" or "analysis" in text
            for delta in deltas:
                if delta.name is not None:
                    calls.append([delta.name, ""])
                calls[-1][1] += delta.arguments
        assert not parser.in_arguments
        assert len(calls) == 1 if seed < 2 else len(calls) >= 1
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            seen.add(name)
    assert seen <= SCHEMAS.keys()
