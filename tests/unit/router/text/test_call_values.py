"""Values of arguments that are not JSON: what they are, and that nothing a model writes fails."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.call_values import gemma, pythonic, to_json, typed
from router.text.tool_formats import ToolFormat
from router.text.tool_parser import CallParser

ODD = [
    *("'\\ud800'", "'\\d'", "9" * 5000, "(" * 3000, "1e999", "1j", "b'x'", "{1}", "nan"),
    *("[" * 3000, "{'a':", "<escape>", "{a:<escape>", "f()", "__import__('os')", "1,2", ""),
    *("[}", "[1}", "{a:[}", "[a:{]", "{a:]", "[,}", "[[}]"),
]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (" 5 ", {"type": ["integer", "null"]}, 5),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("null", {"type": "object"}, None),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('{"a": 1}', {"$ref": "#/$defs/x"}, {"a": 1}),
        ("soon", {"type": "integer"}, "soon"),
        ("5", None, "5"),
        ("5", {}, "5"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, "x"]}, 5),
    ],
)
def test_a_text_has_the_type_of_its_parameter(text: str, schema: object, value: object) -> None:
    assert typed(text, schema) == value


@pytest.mark.parametrize("text", ODD)
def test_whatever_is_written_becomes_json(text: str) -> None:
    for value in (typed(text, {"type": "object"}), pythonic(text), gemma(text)):
        json.loads(to_json(value).encode())


@given(
    st.sampled_from(
        [
            (ToolFormat.PYTHONIC, "[f(a={}, b={})]"),
            (ToolFormat.GEMMA, "<start_function_call>call:f{{a:{},b:{}}}<end_function_call>"),
            (ToolFormat.QWEN_XML, "<function=f><parameter=a>{}</parameter><parameter=b>{}"),
        ]
    ),
    *[st.sampled_from(ODD) | st.text("ab'\"\\{}[](),:<>\n ", max_size=12)] * 2,
)
def test_complete_calls_have_arguments_in_json(
    form: tuple[ToolFormat, str], first: str, second: str
) -> None:
    tool_format, template = form
    parser = CallParser(tool_format, {"f": {"a": {"type": "object"}, "b": {}}})
    _, deltas = parser.push(template.format(first, second), last=True)
    arguments = "".join(delta.arguments for delta in deltas if delta.index == 0)
    arguments.encode()
    if parser.num_calls == 1 and not parser.in_arguments:
        assert isinstance(json.loads(arguments), dict)
