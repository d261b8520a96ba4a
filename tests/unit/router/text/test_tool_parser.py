"""Calls are read alike however the text is cut, and what is no call stays text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.tool_formats import ToolFormat
from router.text.tool_parser import CallParser, call_id

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL
NAMES = {"weather", "add"}
OSLO = '{"city": "Oslo {\\"}"}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'


def read(form, pieces, **options):
    """Text and calls (name, arguments) of pieces; ids, indexes and order are checked on the way."""
    numbers = itertools.count()
    parser = CallParser(form, NAMES, make_id=lambda _form: f"id{next(numbers)}", **options)
    text, calls = "", []
    for i, piece in enumerate(pieces):
        plain, deltas = parser.push(piece, last=i == len(pieces) - 1)
        text += plain
        for delta in deltas:
            if delta.id is not None:
                assert delta.id == f"id{len(calls)}"
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


CALLS = [
    (HERMES, HERMES_CALL, "", [("weather", OSLO)]),
    (HERMES, f"Let me see.\n{HERMES_CALL}\n", "Let me see.", [("weather", OSLO)]),
    (
        HERMES,
        f'{HERMES_CALL}\n<tool_call>{{"arguments": {{"a": [1]}}, "name": "add"}}</tool_call>',
        "",
        [("weather", OSLO), ("add", '{"a": [1]}')],
    ),
    (HERMES, f"a {HERMES_CALL} b", "a b", [("weather", OSLO)]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (LLAMA, f'{{"name": "weather", "parameters": {OSLO}}}', "", [("weather", OSLO)]),
    (
        LLAMA,
        f'\n<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "add", '
        '"parameters": {}}',
        "",
        [("weather", OSLO), ("add", "{}")],
    ),
    (
        LLAMA,
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}, "id": "123456789"}}, '
        '{"name": "add", "arguments": {"a": 2}}]',
        "",
        [("weather", OSLO), ("add", '{"a": 2}')],
    ),
    (
        MISTRAL,
        f'Yes.[TOOL_CALLS]weather{OSLO}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{"a": 3}}',
        "Yes.",
        [("weather", OSLO), ("add", '{"a": 3}')],
    ),
]
PLAIN = [
    (HERMES, '<tool_call>{"name": "get\\_weather", "arguments": {}}</tool_call>'),  # not JSON's \
    (HERMES, '<tool_call>{"name": "add\n", "arguments": {}}</tool_call>'),
    (HERMES, "no call <tool at all> \n"),
    (HERMES, '<tool_call>{"name": "missing", "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>\nhello</tool_call> "),
    (HERMES, '<tool_call>{"name": "add"'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, "<tool_call>{]} </tool_call>"),
    (HERMES, " \n"),
    (LLAMA, '  {"a": 1} and more'),
    (LLAMA, 'I write {"name": "add", "parameters": {}}'),
    (LLAMA, '<|python_tag|>print("x")'),
    (LLAMA, "<|pyth"),
    (MISTRAL, "[TOOL_CALLS]missing{}"),
    (MISTRAL, "[TOOL_CALLS][1, 2]"),
    (MISTRAL, "[TOOL_CALLS] what? {}"),
    (MISTRAL, "[TOOL_CAL"),
]


def cuts(text):
    """The text in one piece, by single characters, and cut in two at every place."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


@pytest.mark.parametrize(("form", "text", "plain", "calls"), CALLS)
def test_calls_are_read_however_the_text_is_cut(form, text, plain, calls):
    expected = [(name, json.loads(arguments)) for name, arguments in calls]
    for pieces in cuts(text):
        assert read(form, pieces) == (plain, expected)


@pytest.mark.parametrize(("form", "text"), PLAIN)
def test_what_is_no_call_stays_as_it_was(form, text):
    for pieces in cuts(text):
        assert read(form, pieces) == (text, [])


@given(
    st.sampled_from(list(ToolFormat)),
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", '"', "\\"),
                *('{"name": "add", "arguments": ', '{"name": "add", "parameters": {', "add", ";"),
                *(",", " ", "x"),
            ]
        ),
        max_size=12,
    ).map("".join),
)
def test_any_text_is_read_alike_in_one_piece_and_by_characters(form, text):
    def calls_of(pieces):
        parser = CallParser(form, NAMES, make_id=lambda _form: "id")
        plain, calls = "", {}
        for i, piece in enumerate(pieces):
            part, deltas = parser.push(piece, last=i == len(pieces) - 1)
            plain += part
            for delta in deltas:
                calls[delta.index] = calls.get(delta.index, "") + delta.arguments
        return plain, calls

    if text:
        plain, calls = calls_of([text])
        assert calls_of(list(text)) == (plain, calls)
        if not calls:
            assert plain == text


def test_arguments_come_as_they_are_written_and_the_name_before_them():
    parser = CallParser(HERMES, NAMES)
    seen = [parser.push(char, last=False)[1] for char in HERMES_CALL]
    pieces = [delta.arguments for deltas in seen for delta in deltas]
    assert len(pieces) >= len(OSLO)
    first = next(i for i, deltas in enumerate(seen) if deltas)
    assert HERMES_CALL[: first + 1].endswith('"arguments": {')


def test_only_the_first_call_counts_without_parallel_calls():
    for form, text, _, calls in CALLS:
        _, found = read(form, list(text), several=False)
        assert found == [(calls[0][0], json.loads(calls[0][1]))]


def test_ids_suit_the_templates():
    assert len({call_id(HERMES) for _ in range(50)}) == 50
    assert call_id(HERMES).startswith("call_")
    assert len(call_id(MISTRAL)) == 9
    assert call_id(MISTRAL).isalnum()


@pytest.mark.parametrize(
    ("form", "cut"),
    [
        (HERMES, f'{HERMES_CALL}\n<tool_call>\n{{"name": "add", "argum'),
        (HERMES, f"{HERMES_CALL}\n<tool_c"),
        (LLAMA, f'{{"name": "weather", "parameters": {OSLO}}}; {{"name": "ad'),
    ],
)
def test_a_forced_call_that_is_cut_before_its_arguments_is_no_text(form, cut):
    assert read(form, [cut], forced=True) == ("", [("weather", json.loads(OSLO))])
    assert read(form, list(cut), forced=True) == ("", [("weather", json.loads(OSLO))])
