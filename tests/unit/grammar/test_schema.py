"""Schemas keep their meaning when the library cannot take them as they are."""

from __future__ import annotations

import contextlib
import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.compiler import Compiler
from grammar.schema import for_library, lark_for_library, without_rare
from grammar.vocabulary import byte_vocabulary
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind

VOCABULARY = byte_vocabulary({0: "<end>"})
COMPILER = Compiler(VOCABULARY)
CLASSES = [
    *(r'[^"]', r"[^\\]", r'[^"\\]', r'[^a"]', r'[^,"]', r"[^'\"]", r'[^"\n]', r'[^\]"]', r'[^"-]'),
    *(
        r'[^<>:"/\\|?*]',
        r"[\x00-\x1f]",
        r'[^"\x00-\x1f]',
        r'[^"\t]',
        r'[^"\s]',
        r"\W",
        r"\S",
        r"\D",
    ),
    *(r"[a-z]", ".", r"[\s\S]", r"[^a]", r'[^\d"]', r"[\x00-\x21\x23-\x7f]", r'[\^"]', r"[^\x22]"),
]


def accepts(schema, text, kind=GrammarKind.JSON_SCHEMA):
    source = schema if kind is GrammarKind.LARK else json.dumps(schema)
    state = COMPILER.start(Grammar(kind=kind, source=source), ends=(0,)).state
    tokens = VOCABULARY.tokenize_str(text)
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


@pytest.mark.parametrize("form", ["^{}$", "^{}+$", "^(?:x|{})$", "^({}){{1,3}}$"])
def test_a_pattern_excludes_what_pythons_re_excludes(form):
    """Quotes and backslashes come as escapes in JSON: those of excluded ones do not match."""
    for item in CLASSES:
        pattern = form.format(item)
        schema = {"type": "string", "pattern": pattern}
        for char in ('"', "\\", "\n", "\t", "a", " ", "^", "-", "~"):
            wanted = re.search(pattern, char) is not None
            assert accepts(schema, json.dumps(char)) is wanted, (pattern, char)


def test_patterns_within_a_schema_and_within_a_grammar_are_rewritten_too():
    inner = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": '^[^"]+$'}}}
    inner |= {"patternProperties": {'^x[^"]$': {"type": "string"}}, "additionalProperties": False}
    rule = f'start: "%json {{" x\nx: %json {json.dumps(inner)}'
    for text in ('{"pattern": "a"}', '{"pattern": "\\n"}', '{"xa": ""}'):
        assert accepts(inner, text)
        assert accepts(rule, "%json {" + text, GrammarKind.LARK)
    for text in ('{"pattern": "\\""}', '{"x\\"": ""}', '{"pattern": "a\\"b"}'):
        assert not accepts(inner, text)
        assert not accepts(rule, "%json {" + text, GrammarKind.LARK)


def test_classes_within_classes_are_one_class():
    rare = without_rare("[a]")[3:]
    assert without_rare(r'a\[[^[:cntrl:]"]]') == r"a\[[" + '[^[:cntrl:]"]' + rare[1:] + "]"
    assert without_rare("a[b") == "a[b"  # the error shows the pattern as it came
    assert without_rare("[]a]b") == "[[]a]" + rare[1:] + "b"
    assert not accepts({"type": "string", "pattern": '^[^[:cntrl:]"]$'}, json.dumps('"'))


NUMBERS = [-(2**63), -1e30, -(10**19), -5, 0, 0.5, 7, 2**63 - 1, 10**19, 3.4e38]
BOUNDS = [
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "exclusiveMinimum": -(2**63)},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    {"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308},
    {"type": ["number", "null"], "exclusiveMaximum": 1e40},
    {"maximum": 1e19, "type": "number"},
]


@pytest.mark.parametrize("schema", BOUNDS, ids=json.dumps)
def test_bounds_beyond_the_librarys_numbers_pass_and_hold(schema):
    validator = jsonschema.Draft202012Validator(schema)
    for number in NUMBERS:
        text = format(number, ".0f") if float(number).is_integer() else str(number)
        valid = validator.is_valid(json.loads(text))
        if accepts(schema, text):
            assert valid, number
        elif abs(number) < 2**62:
            assert not valid, number


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 10.0, "exclusiveMaximum": 10.25},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": -1.75, "exclusiveMaximum": -1},
    ],
    ids=json.dumps,
)
def test_a_whole_bound_that_is_excluded_is_never_written(schema):
    """The library took it where the other bound is within the next whole number."""
    validator = jsonschema.Draft202012Validator(schema)
    for text in ("-1.5", "-1", "-0", "-0.25", "0", "0.25", "0.5", "10", "10.125"):
        assert accepts({"type": "number"} | schema, text) is validator.is_valid(json.loads(text))


ENDS = st.sampled_from([-2, -1.75, -1, -0.25, 0, 0.25, 0.5, 1, 1.5, 10, 10.25])
LIMITS = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    ENDS,
    max_size=2,
)


def joined(parts):
    branches = st.lists(parts, min_size=1, max_size=2)
    ways = [st.builds(lambda a, b, key=key: a | {key: b}, LIMITS, branches) for key in JOINS]
    return st.one_of(st.builds(lambda a, b: a | {"allOf": [b]}, LIMITS, parts), *ways)


JOINS = ("allOf", "anyOf")


@settings(max_examples=150, deadline=None)
@given(schema=st.recursive(LIMITS, joined, max_leaves=5), refers=st.booleans())
def test_bounds_hold_together_wherever_in_a_schema_they_are(schema, refers):
    """Schemas are joined, and then one's bound is within the next whole number of another's."""
    schema = {"$ref": "#/$defs/a", "$defs": {"a": schema}} if refers else schema
    schema = {"type": "number"} | schema
    validator = jsonschema.Draft202012Validator(schema)
    for text in ("-2", "-1.8", "-1.5", "-1", "-0.1", "0", "0.1", "0.5", "1", "1.1", "10", "10.1"):
        try:
            taken = accepts(schema, text)
        except InvalidRequest:  # no number is left
            taken = False
        assert taken is validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("bound", ["1e400", "-1e400", "NaN", "1" + "0" * 400, "1e308", "-0.0"])
@pytest.mark.parametrize("end", ["0.5", "1e400", "NaN", "-1" + "0" * 400])
def test_bounds_of_any_size_are_rewritten(bound, end):
    for form in (
        '{"exclusiveMinimum": %s, "maximum": %s}',
        '{"exclusiveMaximum": %s, "minimum": %s}',
    ):
        assert for_library(form % (bound, end))


def test_a_bound_that_leaves_only_numbers_beyond_is_refused():
    with pytest.raises(InvalidRequest):
        accepts({"type": "number", "minimum": 1e19}, "1")


def test_unknown_formats_are_annotations_and_known_ones_hold():
    for name in ("path", "password", "binary", "byte", "uri-reference", "color", "", "regex"):
        schema = {"type": "string", "format": name}
        assert accepts(schema, '"anything at all"')
        assert jsonschema.Draft202012Validator(schema).is_valid("anything at all")
    assert not accepts({"type": "string", "format": "date"}, '"anything at all"')
    assert accepts({"type": "string", "format": "date"}, '"2026-01-31"')
    named = {"type": "object", "properties": {"format": {"type": "string", "format": "path"}}}
    assert accepts(named, '{"format": "/tmp"}')
    assert accepts({"const": {"format": "path"}}, '{"format": "path"}')  # data is no schema


@pytest.mark.parametrize("value", [5, None, {}, [], ["date"], True])
@pytest.mark.parametrize("key", ["format", "pattern", "minimum", "uniqueItems", "properties"])
def test_a_keyword_of_another_type_is_refused_or_asks_for_nothing(key, value):
    """With an error that names it, never another one."""
    with contextlib.suppress(InvalidRequest):
        accepts({"type": ["string", "array", "number", "object"], key: value}, '""')


def test_unique_items_false_asks_for_nothing():
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": False}
    assert accepts(schema, "[1, 1]")
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        accepts(schema | {"uniqueItems": True}, "[1]")


def test_a_rule_without_json_is_refused():
    with pytest.raises(InvalidRequest, match="%json"):
        lark_for_library("start: %json {nothing")
    with pytest.raises(InvalidRequest, match="%json"):
        lark_for_library("start: %json " + "[" * 100_000)
    assert lark_for_library("start: /%json {/") == "start: /%json {/"
