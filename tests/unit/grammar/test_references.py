"""A schema that leads to nothing but itself is refused before an output comes to it."""

from __future__ import annotations

import json
import re
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
WAYS = ("#/$defs/{}", "#{}", "https://x.y/{}", "{}", "https://x.y/a#/$defs/{}", "https://x.y/b#{}")
REFS = st.sampled_from(
    [{"$ref": way.format(name)} for way in WAYS for name in NAMES] + [{"$ref": "#"}]
)


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
NAMED = st.builds(
    lambda schema, name, keys: schema | dict.fromkeys(keys, name),
    SCHEMAS,
    st.sampled_from(NAMES),
    st.sets(st.sampled_from(["$id", "$anchor"])),
)
DEFS = st.fixed_dictionaries(dict.fromkeys(NAMES, NAMED))


@settings(max_examples=200, deadline=None)
@given(
    root=SCHEMAS,
    defs=DEFS,
    inner=DEFS,
    top=st.sampled_from([{}, {"$id": "https://x.y/"}, {"$id": "https://x.y/c"}]),
    choices=st.lists(st.integers(0, 300), min_size=120, max_size=120),
)
def test_what_is_accepted_has_a_way_on_everywhere(
    root: dict[str, Any],
    defs: dict[str, Any],
    inner: dict[str, Any],
    top: dict[str, str],
    choices: list[int],
) -> None:
    defs |= {"a": defs["a"] | {"$defs": inner}}
    source = json.dumps(behind_a_long_text(root, **defs) | top)
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
NAMED_CIRCLES = {
    "#n": behind_a_long_text({"$ref": "#n"}, a={"$anchor": "n", "$ref": "#n"}),
    "#m": behind_a_long_text({"$ref": "#m"}, a={"$anchor": "m", "$ref": "#/$defs/a"}),
    "#f": behind_a_long_text({"$ref": "#f"}, a={"$id": "#f", "anyOf": [{"$ref": "#f"}]})
    | {"$schema": "http://json-schema.org/draft-07/schema#"},
    "https://x.y/i": behind_a_long_text(
        {"$ref": "https://x.y/i"}, a={"$id": "https://x.y/i", "$ref": "#"}
    ),
    "i": behind_a_long_text({"$ref": "i"}, a={"$id": "i", "$ref": "j#/$defs/a"})
    | {"$id": "https://x.y/j"},
    "#": behind_a_long_text({"$id": "https://x.y/i", "$ref": "#"}),
    "k#n": behind_a_long_text(
        {"$ref": "k#n"}, a={"$id": "k", "$defs": {"b": {"$anchor": "n", "$ref": "#n"}}}
    ),
    "urn:x:y#/$defs/b": behind_a_long_text(
        {"$ref": "urn:x:y#/$defs/b"}, a={"$id": "urn:x:y", "$defs": {"b": {"$ref": "#/$defs/b"}}}
    ),
}
NULL = {"type": "null"}
#: Schemas of an `x` that is an integer, and would be null if a reference went elsewhere.
RESOLVED = [
    behind_a_long_text({"$ref": "#n"}, a={"$anchor": "n"} | INTEGER),
    behind_a_long_text({"$ref": "#%6E"}, a={"$anchor": "n"} | INTEGER),
    behind_a_long_text(
        {"$ref": "https://x.y/i"},
        a={"$id": "https://x.y/i", "$ref": "#/$defs/b", "$defs": {"b": INTEGER}},
        b=NULL,
    ),
    behind_a_long_text(
        {"$ref": "https://x.y/i#n"},
        a={
            "$id": "https://x.y/i",
            "$defs": {"b": {"$anchor": "n", "$ref": "#m"}, "c": {"$anchor": "m"} | INTEGER},
        },
        b={"$anchor": "m"} | NULL,
    ),
    behind_a_long_text(
        {"$ref": "#/$defs/a/$defs/b"},
        a={"$id": "i", "$defs": {"b": {"$ref": "#/$defs/c"}, "c": INTEGER}},
        c=NULL,
    ),
    behind_a_long_text({"$ref": "../j"}, a={"$id": "/j"} | INTEGER, b={"$id": "j"} | NULL)
    | {"$id": "https://x.y/k/"},
    behind_a_long_text(
        {"$ref": "#/$defs/a~1%25"},
        **{"a/%": {"$id": "k", "$ref": "#n", "$defs": {"~": {"$anchor": "n"} | INTEGER}}},
    ),
    behind_a_long_text({"$ref": "#/$defs/Paar ä[a, b] <%>"}, **{"Paar ä[a, b] <%>": INTEGER}),
    behind_a_long_text(
        {"$ref": "#/$defs/a"}, a={"$id": "i", "$ref": "#/$defs/b", "$defs": {"b": NULL}}, b=INTEGER
    )
    | {"$schema": "http://json-schema.org/draft-07/schema#"},  # there `$ref` stands alone
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


@pytest.mark.parametrize("ref", NAMED_CIRCLES)
def test_circles_of_names_are_refused_as_they_are_written(ref: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{re.escape(ref)} only leads to itself"):
        follow(GrammarKind.JSON_SCHEMA, json.dumps(NAMED_CIRCLES[ref]), [])


@pytest.mark.parametrize("schema", RESOLVED, ids=json.dumps)
def test_references_lead_where_their_names_say(schema: dict[str, Any]) -> None:
    source = json.dumps(schema)
    matcher = COMPILER.start(Grammar(kind=GrammarKind.JSON_SCHEMA, source=source), ends=(END,))
    text = json.dumps({"p": LONG["const"], "x": 1}, separators=(",", ":"))
    matcher.take([*text.encode(), END])
    compute_masks([matcher])
    assert not matcher.error


@pytest.mark.parametrize("key", ["$dynamicAnchor", "$dynamicRef", "$recursiveRef"])
def test_references_that_depend_on_who_refers_are_refused_by_name(key: str) -> None:
    schema = behind_a_long_text({"$ref": "#/$defs/a"}, a={key: "#n", "$anchor": "n"})
    with pytest.raises(InvalidRequest, match=re.escape(f'["{key}"]')):
        follow(GrammarKind.JSON_SCHEMA, json.dumps(schema), [])


def test_what_is_not_in_the_document_matters_only_where_an_output_comes_to_it() -> None:
    missing = {"$id": "https://x.y/i", "$ref": "#n"}
    follow(GrammarKind.JSON_SCHEMA, json.dumps(behind_a_long_text(INTEGER, a=missing)), [])
    schema = behind_a_long_text(missing, b={"$anchor": "n"} | INTEGER)
    with pytest.raises(InvalidRequest, match=r"^#n refers to nothing within the schema$"):
        follow(GrammarKind.JSON_SCHEMA, json.dumps(schema), [])


def test_ways_are_written_out_within_bounds() -> None:
    deep: dict[str, Any] = {"$anchor": "n"} | INTEGER
    for _ in range(10):
        deep = {"properties": {"k" * 4000: deep}}
    refs = {f"r{i}": {"$ref": "#n"} for i in range(20)}
    with pytest.raises(InvalidRequest, match="too long"):
        follow(GrammarKind.JSON_SCHEMA, json.dumps(behind_a_long_text(deep, **refs)), [])


@pytest.mark.parametrize("schema", GOOD, ids=lambda schema: json.dumps(schema)[:200])
def test_what_leads_to_a_text_is_taken(schema: dict[str, Any]) -> None:
    follow(GrammarKind.JSON_SCHEMA, json.dumps(schema), list(range(100)))
