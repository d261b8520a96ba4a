"""What a grammar may be at most, judged by its source."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from grammar.bounds import MAX_REGEX_CHARS, check_source, written_out
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind


@pytest.mark.parametrize(
    ("regex", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a{5}", 5),
        ("a{2,7}b", 8),
        ("[^]a-z]{10}", 70),
        (r"\d{3}-\d{4}", 15),
        ("(ab){3}", 9),
        ("a{100}{100}{100}", 1_000_000),
        ("((a{100}){100}){100}", 1_010_100),
        ("(a|b)*", 3),
        (r"\({9}", 18),
        ("a{,5}", 5),
        ("a{3,}", 3),
        ("{}{", 1),
        (")(", 1),
        ("[", 1),
        ("\\", 1),
        ("a{007}", 7),
        ("a{" + "9" * 9000 + "}", 999_999_999_999),
        ("(" * 99 + "a" + "){999999999999}" * 99, 1 << 40),
    ],
)
def test_repetitions_are_written_out(regex, length):
    assert written_out(regex) == length


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


LONG = "x" * 5000
REPEATED = f"a{{{2 * MAX_REGEX_CHARS}}}"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "a{100}{100}{100}"),
        (GrammarKind.REGEX, "a" * (MAX_REGEX_CHARS + 1)),
        (GrammarKind.REGEX, "abc" + "\\" * 3),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^abc\\"})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"patternProperties": {"a\\": {}}})),
        (GrammarKind.LARK, f"start: /{REPEATED}/"),
        (GrammarKind.LARK, "#" * 300_000),
        (GrammarKind.LARK, f'start: "{LONG}"'),
        (GrammarKind.LARK, "start: a{100}{100}{100}\na: /b/"),
        (GrammarKind.LARK, 'start: %json {"type": "string", "pattern": "' + REPEATED + '"}'),
        (GrammarKind.CHOICE, json.dumps([])),
        (GrammarKind.CHOICE, json.dumps(["a", ""])),
        (GrammarKind.CHOICE, json.dumps(["a", 1])),
        (GrammarKind.CHOICE, json.dumps([LONG])),
        (GrammarKind.CHOICE, "[" * 100_000),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, json.dumps(deep(100))),
        (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {"a": {"pattern": REPEATED}}})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"patternProperties": {REPEATED: {}}})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["a", LONG]})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {LONG: {}}})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": list(range(60_000))})),
    ],
)
def test_too_much_is_refused(kind, source):
    with pytest.raises(InvalidRequest):
        check_source(Grammar(kind=kind, source=source))


@pytest.mark.parametrize(
    "source",
    [
        'start: "' + '\\"' * 130_000,
        "start: /" + "\\/" * 130_000,
        '"a' * 130_000,
        "/a\n" * 80_000,
        "{" * 260_000,
        "{1" * 130_000,
        "[" * 260_000,
        "\\" * 260_000,
        "(" * 130_000 + ")" * 130_000,
    ],
    ids=lambda source: source[:12],
)
@pytest.mark.parametrize("kind", list(GrammarKind))
def test_a_source_is_read_in_time_that_grows_with_its_length(kind, source):
    """Each is read in tens of milliseconds; what looks at any of it twice takes minutes."""
    start = time.process_time()
    with contextlib.suppress(InvalidRequest):
        check_source(Grammar(kind=kind, source=source))
    assert time.process_time() - start < 10


def test_usual_grammars_are_within_bounds():
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
            "state": {"enum": [f"state {i}" for i in range(2000)]},
        },
    }
    for kind, source in [
        (GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        (GrammarKind.REGEX, r"(\d{1,3}\.){3}\d{1,3}"),
        (GrammarKind.CHOICE, '["yes", "no"]'),
        (GrammarKind.LARK, 'start: "a"{1,9}'),
        (GrammarKind.LARK, "".join(f'rule_{i}: "word" | /[a-z]+{i}/\n' for i in range(2000))),
    ]:
        check_source(Grammar(kind=kind, source=source))
