"""Texts within limits: what a model could write under their grammars, and all that it could not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grammar.compiler import Compiler
from grammar.matcher import Matcher, compute_masks
from grammar.vocabulary import byte_vocabulary
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind
from router.request.endpoints import CompletionRequest
from router.request.limited_text import LimitedText
from router.request.parse import parse_json
from router.request.tools import Function
from router.text.free_text import limited_grammar
from router.text.reasoning_grammar import after_thought
from router.text.tool_formats import ToolFormat
from router.text.tool_grammar import WITHIN_TEXT, call_grammar
from router.text.tool_parser import CallParser

END, MARK = 0, 1
NAMES = {END: "<end>", MARK: "<tool>"}
VOCABULARY = byte_vocabulary(NAMES)
SPECIAL_IDS = {text: i for i, text in NAMES.items()}
INTEGER = {"type": "integer"}


def form(**fields: Any) -> LimitedText:
    request = parse_json(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)
    assert request.structured is not None
    assert isinstance(request.structured.form, LimitedText)
    return request.structured.form


def begun(grammar: Grammar, output: str = "") -> Matcher:
    """A matcher behind an output in which `<tool>` is the token."""
    parts = re.split(r"(<tool>)", output)
    ids = [i for p in parts for i in ([MARK] if p == "<tool>" else spelled(p))]
    return Compiler(VOCABULARY).start(grammar, ends=[END], output=ids)


def spelled(text: str) -> list[int]:
    return [VOCABULARY.tokenize_bytes(bytes([byte]))[0] for byte in text.encode()]


def allowed(matcher: Matcher) -> set[str]:
    bits = int.from_bytes(matcher.mask or b"", "little")
    ids = [i for i in range(VOCABULARY.vocab_size) if bits >> i & 1]
    return {NAMES.get(i) or VOCABULARY.decode_bytes([i]).decode("latin-1") for i in ids}


def written(grammar: Grammar, seed: int, wish: Callable[[bytes], Sequence[int]]) -> str:
    """A text of up to 80 tokens that a model with wishes could write; marks are spelled."""
    matcher, draw, text = begun(grammar), random.Random(seed), b""
    for _ in range(80):
        bits = int.from_bytes(matcher.mask or b"", "little")
        open_ids = [i for i in range(VOCABULARY.vocab_size) if bits >> i & 1]
        wished = [i for i in wish(text) if bits >> i & 1]
        token = draw.choice(wished if wished and draw.random() < 0.9 else open_ids)
        if token == END:
            break
        text += NAMES[token].encode() if token in NAMES else VOCABULARY.decode_bytes([token])
        matcher.take([token])
        compute_masks([matcher])
        assert not matcher.error, matcher.error
    return text.decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(5))
def test_bad_words_never_come_up(seed: int) -> None:
    words = ["start", "ab", 'a"', "é"]
    grammar = limited_grammar(form(bad_words=words), SPECIAL_IDS, [END])
    text = written(grammar, seed, lambda _: spelled('stara"bé'))
    assert len(text) > 10
    assert not any(word in text for word in words)


def test_free_text_may_end_anywhere_and_has_no_special_tokens() -> None:
    open_set = allowed(begun(limited_grammar(form(bad_words=["bad"]), {}, [END]), "so ba"))
    assert "<end>" in open_set
    assert "d" not in open_set
    assert {"a", "\n", "D"} <= open_set
    assert "<tool>" not in open_set


@pytest.mark.parametrize(("ids", "may_end"), [([5, 6, 7, 90], False), ([5, END], True)])
def test_only_these_tokens(ids: list[int], may_end: bool) -> None:
    grammar = limited_grammar(form(allowed_token_ids=ids), SPECIAL_IDS, [END])
    matcher = Compiler(VOCABULARY).start(grammar, ends=[END])
    for token in (5, 5, 5):
        bits = int.from_bytes(matcher.mask or b"", "little")
        assert [i for i in range(VOCABULARY.vocab_size) if bits >> i & 1] == sorted(ids)
        matcher.take([token])
        compute_masks([matcher])
    assert ("<end>" in allowed(matcher)) is may_end


STRUCTURES = {
    "structures": [
        {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=start>", "schema": {"enum": ["start"]}, "end": "</f>"},
        {"begin": "<tool>x", "schema": INTEGER, "end": "<tool>"},
    ],
    "triggers": ["<f", "<tool>"],
}


def test_tags_follow_their_triggers() -> None:
    tags = {"response_format": {"type": "structural_tag", **STRUCTURES}}
    grammar = limited_grammar(form(**tags), SPECIAL_IDS, [END])
    assert {"<end>", "<tool>", "<"} <= allowed(begun(grammar, "any < text"))
    assert allowed(begun(grammar, "so <f")) == {"="}
    assert allowed(begun(grammar, "so <f=")) == {"a", "s"}
    assert allowed(begun(grammar, "<f=start>")) == {'"'}
    assert allowed(begun(grammar, "so <f=a>12</f")) == {">"}
    assert {"<end>", "z"} <= allowed(begun(grammar, "so <f=a>12</f>"))
    assert allowed(begun(grammar, "<f=a>1</f> and <tool>")) == {"x"}
    assert "<tool>" in allowed(begun(grammar, "<tool>x7"))
    assert allowed(begun(grammar, "<tool>x7<tool> <f")) == {"="}


def test_tags_in_words_of_xgrammar() -> None:
    content = {"type": "regex", "pattern": r"[0-9]+\start"}
    tags: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<tool>"]}
    tags["tags"] = [{"type": "tag", "begin": "<tool>x", "content": content, "end": "!"}]
    for required, single in ((False, False), (True, False), (False, True), (True, True)):
        asked = tags | {"at_least_one": required, "stop_after_first": single}
        text = json.dumps({"type": "structural_tag", "format": asked})
        grammar = limited_grammar(
            form(structured_outputs={"structural_tag": text}), SPECIAL_IDS, [END]
        )
        assert ("<end>" in allowed(begun(grammar, "ab"))) is not required
        assert "t" in allowed(begun(grammar, "ab<tool>x12\t"))
        assert ("z" in allowed(begun(grammar, "ab<tool>x12\ttart!"))) is not single
        assert "<end>" in allowed(begun(grammar, "ab<tool>x12\ttart!"))
        moved = after_thought(grammar, "thought", ['thought: "hm"'], "response_format")
        assert allowed(begun(moved, "hm ab<tool>")) == {"x"}
    tags["tags"][0]["content"]["pattern"] = "[0-9]\\"
    cut_off = form(response_format={"type": "structural_tag", "format": tags})
    with pytest.raises(InvalidRequest, match="ends with a backslash"):
        limited_grammar(cut_off, SPECIAL_IDS, [END])


@pytest.mark.parametrize("count", [2, 5000])
def test_a_choice_of_many_holds_behind_a_thought_as_without_one(count: int) -> None:
    choices = [f"choice {number} of\n{count}" for number in range(count)]
    plain = Grammar(kind=GrammarKind.CHOICE, source=json.dumps(choices))
    behind = after_thought(plain, "thought", ['thought: "hm"'], "guided_choice")
    for grammar, before in ((plain, ""), (behind, "hm")):
        assert allowed(begun(grammar, f"{before}choice")) == {" "}
        assert "1" in allowed(begun(grammar, f"{before}choice "))
        assert allowed(begun(grammar, f"{before}choice 1 of\n")) == {str(count)[0]}
        assert allowed(begun(grammar, f"{before}{choices[-1]}")) == {"<end>"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "a"}]}},
            "response_format.triggers",
        ),
        (
            {"response_format": {"type": "structural_tag", **STRUCTURES, "triggers": ["<f"]}},
            "response_format.structures[2].begin",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "or"}}'}},
            "structured_outputs.structural_tag.format.type",
        ),
        ({"bad_words": ["a"], "guided_regex": "b"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3], "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_errors_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        form(**fields)
    assert caught.value.param == param


_ONE: dict[str, Any] = {"properties": {"n": INTEGER}, "required": ["n"]}
TOOLS = [
    Function(name="exact", strict=True, parameters=_ONE),
    Function(name="loose", parameters=_ONE),
]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("tool_format", sorted(WITHIN_TEXT))
def test_calls_of_strict_tools_in_text(tool_format: ToolFormat, special: bool) -> None:
    """Text stays free; a call that comes up follows its schema if its tool is strict."""
    marks = dict(enumerate(tool_format.marks, start=1)) if special else {}
    names = {END: "<end>"} | marks
    vocabulary = byte_vocabulary(names)
    ids = {mark: i for i, mark in names.items()}
    source = call_grammar(tool_format, TOOLS, several=True, in_text=True, special_id=ids.get)
    compiler, grammar = Compiler(vocabulary), Grammar(kind=GrammarKind.LARK, source=source)

    def tokens(text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, marks.values())) + ")", text)
        found = list[int]()
        for part in parts if marks else [text]:
            whole = [ids[part]] if part in ids else None
            found += whole or [vocabulary.tokenize_bytes(bytes([b]))[0] for b in part.encode()]
        return found

    def may_follow(text: str) -> bool:
        matcher = compiler.start(grammar, ends=[END])
        matcher.take(tokens(text))
        return not matcher.error

    call = EXAMPLES[tool_format]
    exact, loose = call.replace("NAME", "exact"), call.replace("NAME", "loose")
    assert may_follow("Let me see. ")
    assert may_follow("Let me see. " + exact.replace("VALUE", "12"))
    assert not may_follow("Let me see. " + exact.replace("VALUE", '"x"'))
    assert not may_follow(exact.replace("exact", "other"))
    assert may_follow(loose.replace("VALUE", '"x"'))
    parser = CallParser(tool_format, {tool.name: tool.properties for tool in TOOLS})
    text, (head, *rest) = parser.push("So. " + exact.replace("VALUE", "12"), last=True)
    assert (text, head.name) == ("So.", "exact")
    assert json.loads("".join(delta.arguments for delta in [head, *rest])) == {"n": 12}


_TAGGED = '{"name": "NAME", "arguments": {"n": VALUE}}'
EXAMPLES = {
    ToolFormat.HERMES: f"<tool_call>\n{_TAGGED}\n</tool_call>",
    ToolFormat.MISTRAL: f"[TOOL_CALLS][{_TAGGED}]",
    ToolFormat.MISTRAL_NAMED: '[TOOL_CALLS]NAME[ARGS]{"n": VALUE}',
    ToolFormat.PHI4: f"<|tool_call|>[{_TAGGED}]<|/tool_call|>",
    ToolFormat.GRANITE: f"<|tool_call|>[{_TAGGED}]",
    ToolFormat.DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
    '```json\n{"n": VALUE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ToolFormat.DEEPSEEK_V31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
    '{"n": VALUE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
