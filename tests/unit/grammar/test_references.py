"""A schema that leads to nothing but itself is refused before an output comes to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.compiler import Compiler
from grammar.matcher import compute_masks
from grammar.vocabulary import byte_vocabulary
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind

END = 256
COMPILER = Compiler(byte_vocabulary({END: "<end>"}))
LONG = {"const": "longer than what is tried before a request is accepted"}
INTEGER = {"type": "integer"}
NAMES = ("a", "b", "c")
REFS = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])


def behind_a_long_text(schema: dict[str, Any], **defs: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"p": LONG, "x": schema},
        "required": ["p", "x"],
        "additionalProperties": False,
        "$defs": defs,
    }


def follow(kind: GrammarKind, source: str, choices: list[int]) -> None:
    """Write what the grammar allows. Raises InvalidRequest if it is refused at its start."""
    matcher = COMPILER.start(Grammar(kind=kind, source=source), ends=(END,))
    for choice in choices:
        mask = int.from_bytes(matcher.mask or b"", "little")
        allowed = [token for token in range(33, END + 1) if mask >> token & 1] or [32]
        token = allowed[choice % len(allowed)]
        if token == END:
            return
        matcher.take([token])
        compute_masks([matcher])
        assert not matcher.error


def parts(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(lambda items: {"anyOf": items}, several),
        st.builds(lambda item: {"allOf": [item]}, inner),
        st.builds(lambda item: {"type": "array", "items": item, "minItems": 1}, inner),
        st.builds(lambda item: item | {"title": "T"}, inner),
    )


SCHEMAS = st.recursive(REFS | st.just(INTEGER), parts, max_leaves=4)


@settings(max_examples=200, deadline=None)
@given(
    root=SCHEMAS,
    defs=st.fixed_dictionaries(dict.fromkeys(NAMES, SCHEMAS)),
    choices=st.lists(st.integers(0, 300), min_size=120, max_size=120),
)
def test_what_is_accepted_has_a_way_on_everywhere(
    root: dict[str, Any], defs: dict[str, Any], choices: list[int]
) -> None:
    source = json.dumps(behind_a_long_text(root, **defs))
    for kind, text in (
        (GrammarKind.JSON_SCHEMA, source),
        (GrammarKind.LARK, f"start: %json {source}"),
    ):
        try:
            follow(kind, text, choices)
        except InvalidRequest:
            if root == INTEGER:
                raise


A = {"$ref": "#/$defs/a"}
CIRCLES = [
    behind_a_long_text(A, a=A),
    behind_a_long_text(A, a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a", "title": "B"}),
    behind_a_long_text(A, a={"anyOf": [A, {"allOf": [A]}]}),
    behind_a_long_text({"$ref": "#/properties/x"}),
    behind_a_long_text({"type": "array", "items": A, "minItems": 1}, a=A),
    behind_a_long_text({"$ref": "#/$defs/a~1b%20c"}, **{"a/b c": {"$ref": "#/$defs/a~1b%20c"}}),
    behind_a_long_text({"$ref": "https://x.y/z#/$defs/a"}, a=A) | {"$id": "https://x.y/z"},
    {"type": "object", "properties": {"$ref": {"$ref": "#/properties/$ref"}}},
]
GOOD = [
    behind_a_long_text(A, a={"anyOf": [A, INTEGER]}),
    behind_a_long_text(A, a={"anyOf": [{"$ref": "#/$defs/b"}, INTEGER]}, b=A),
    behind_a_long_text(A, a={"type": "object", "properties": {"next": A}}),
    behind_a_long_text({"$ref": "#/$defs/l/anyOf/1"}, l={"anyOf": [A, INTEGER]}),
    behind_a_long_text(INTEGER, a=A),  # no output comes to it
    behind_a_long_text({"const": A}, a=A),  # data
    {"type": "object", "properties": {"$ref": {"type": "string"}}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(50)}}
    | {"properties": {"a50": INTEGER}},
]
GOOD[-1]["$defs"]["a50"] = INTEGER


@pytest.mark.parametrize("schema", CIRCLES, ids=json.dumps)
def test_a_circle_is_refused_by_its_name(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"only leads to itself: no text has this form"):
        follow(GrammarKind.JSON_SCHEMA, json.dumps(schema), [])


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: json.dumps(schema)[:200])
def test_what_leads_to_a_text_is_taken(schema: dict[str, Any]) -> None:
    follow(GrammarKind.JSON_SCHEMA, json.dumps(schema), list(range(100)))
