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
XML, PYTHONIC, PHI4 = ToolFormat.QWEN_XML, ToolFormat.PYTHONIC, ToolFormat.PHI4
GRANITE, GEMMA, HARMONY = ToolFormat.GRANITE, ToolFormat.GEMMA, ToolFormat.HARMONY
DEEPSEEK, DEEPSEEK_V31 = ToolFormat.DEEPSEEK, ToolFormat.DEEPSEEK_V31
NAMES = {
    "weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "add": {"a": {"type": "number"}, "b": {"type": ["array", "null"]}, "c": {}},
}
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
    # Qwen's coder: strings as they are, line breaks around them left out, other types converted.
    (
        XML,
        'Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo "{</p\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Sure.",
        [("weather", '{"city": "Oslo \\"{</p\\n", "days": 3}')],
    ),
    (
        XML,
        "<function=add>\n<parameter=a>1.5</parameter><parameter=b>[1, 'x']</parameter>"
        "<parameter=c>7</parameter></function><tool_call><function=add></function></tool_call>",
        "",
        [("add", '{"a": 1.5, "b": [1, "x"], "c": "7"}'), ("add", "{}")],
    ),
    (XML, HERMES_CALL, "", [("weather", OSLO)]),
    # Llama 3.2 and 4.
    (
        PYTHONIC,
        " [weather(city='Os\\'lo, )', days=3), add(a=-1.5e3, b=[{'k': None}, True], c=\"x\")]",
        "",
        [
            ("weather", '{"city": "Os\'lo, )", "days": 3}'),
            ("add", '{"a": -1500.0, "b": [{"k": null}, true], "c": "x"}'),
        ],
    ),
    (
        PYTHONIC,
        '<|python_start|>[weather("Oslo", days=2,), add()]<|python_end|>',
        "",
        [("weather", '{"city": "Oslo", "days": 2}'), ("add", "{}")],
    ),
    (PYTHONIC, f'{{"name": "weather", "parameters": {OSLO}}}', "", [("weather", OSLO)]),
    (LLAMA, '[{"name": "add", "parameters": {}}]', "", [("add", "{}")]),
    # Phi-4-mini and Granite 3.
    (
        PHI4,
        f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]<|/tool_call|>',
        "",
        [("weather", OSLO)],
    ),
    (
        PHI4,
        'a functools[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]',
        "a",
        [("add", "{}"), ("add", '{"a": 1}')],
    ),
    (
        GRANITE,
        f'<|tool_call|> [{{"arguments": {OSLO}, "name": "weather"}}]',
        "",
        [("weather", OSLO)],
    ),
    (GRANITE, '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    # DeepSeek V3 and R1, then V3.1.
    (
        DEEPSEEK,
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [("weather", OSLO), ("add", "{}")],
    ),
    (
        DEEPSEEK_V31,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("weather", OSLO), ("add", '{"a": 1}')],
    ),
    # gpt-oss.
    (
        HARMONY,
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>",
        "Let me see.",
        [("weather", OSLO)],
    ),
    (
        HARMONY,
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2}',
        "",
        [("add", '{"a": 2}')],
    ),
    # FunctionGemma.
    (
        GEMMA,
        "<start_function_call>call:weather{city:<escape>Os,}lo<escape>,days:3}<end_function_call>"
        "<start_function_call>call:add{b:[{k:<escape>v<escape>},null,true]}<end_function_call>",
        "",
        [("weather", '{"city": "Os,}lo", "days": 3}'), ("add", '{"b": [{"k": "v"}, null, true]}')],
    ),
]
PLAIN = [
    (XML, "<tool_call>\n<function=missing>\n</function>"),
    (XML, "<tool_call>hello"),
    (XML, "<function=add"),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "[missing(a=1)]"),
    (PYTHONIC, '[{"name": "missing"}]'),
    (PYTHONIC, "[add"),
    (PYTHONIC, "so [add()]"),
    (PHI4, "functools are no [list]"),
    (PHI4, "functools[1]"),
    (GRANITE, "<|tool_call|> none"),
    (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>missing\n```json\n{}"),
    (DEEPSEEK_V31, "<｜tool▁call▁begin｜>add{}"),
    (GEMMA, "<start_function_call>add{}"),
    (GEMMA, "<start_function_call>call:missing{}"),
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
                *(",", " ", "x", "\n", "'", "(", ")", "=", ":"),
                *("<|tool_call|>", "functools", "<function=add>", "<parameter=a>", "</parameter>"),
                *("</function>", "[add(", "<|channel|>", "commentary to=functions.add", "<|end|>"),
                *("<|message|>", "<｜tool▁call▁begin｜>", "add<｜tool▁sep｜>", "```json"),
                *("<｜tool▁call▁end｜>", "<start_function_call>call:add{", "<escape>"),
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
        if not calls and not any(mark in text for mark in (*form.ornaments, "<|message|>")):
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


def test_strings_in_xml_come_as_they_are_written():
    parser = CallParser(XML, NAMES)
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo and Bergen\n</parameter>"
    seen = [parser.push(char, last=False)[1] for char in text]
    pieces = [delta.arguments for deltas in seen for delta in deltas]
    assert "".join(pieces) == '{"city": "Oslo and Bergen"'
    assert len([piece for piece in pieces if piece]) > 15


def test_marks_that_are_special_tokens_are_never_text():
    """Neither where they begin no call, nor alone."""
    for form, text, expected in (
        (GRANITE, "a <|tool_call|> none", "a  none"),
        (GRANITE, "<|tool_call|>", ""),
        (MISTRAL, "x[ARGS]y[TOOL_CALLS]missing{}z", "xymissing{}z"),
        (HERMES, "</tool_call>ok<tool_call>", "ok"),
    ):
        for pieces in cuts(text):
            assert read(form, pieces, hidden=form.marks) == (expected, [])
