"""Masks: what they allow spells the grammar, and nothing but the output decides them."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.compiler import Compiler
from grammar.matcher import compute_masks
from grammar.vocabulary import byte_vocabulary, load_vocabulary
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind
from tests.support.tiny_text import byte_level, sentencepiece_like

VOCAB = 500  # more than the tokenizer has: the rest is padding
ENDS = (2, 0)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request):
    return request.param()


@pytest.fixture(scope="module")
def compiler(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = load_vocabulary(folder, VOCAB)
    assert vocabulary is not None
    return Compiler(vocabulary)


def test_tokens_that_the_model_has_no_row_for_are_left_out(tmp_path):
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path, size)
    assert vocabulary is not None
    assert vocabulary.vocab_size == size
    start = Compiler(vocabulary).start(regex("[a-z]{3}"), ends=ENDS)
    assert tokenizer.token_to_id("a") in ids_of(start.mask, size)


def ids_of(mask, vocab_size=VOCAB):
    assert len(mask) == -(-vocab_size // 32) * 4
    bits = int.from_bytes(mask, "little")
    return [i for i in range(vocab_size) if bits >> i & 1]


def regex(source):
    return Grammar(kind=GrammarKind.REGEX, source=source)


def schema(value):
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(value))


def sample(compiler, grammar, seed, limit=400):
    """Random allowed tokens up to an end, with ends preferred after a while."""
    draw = random.Random(seed)
    matcher = compiler.start(grammar, ends=ENDS)
    output = []
    while len(output) < limit:
        allowed = ids_of(matcher.mask)
        ends = [token for token in allowed if token in ENDS]
        token = draw.choice(ends if ends and len(output) > 60 else allowed)
        if token in ENDS:
            return output
        output.append(token)
        matcher.take([token])
        compute_masks([matcher])
        assert not matcher.error
    return None


def text_of(compiler, output):
    return compiler._vocabulary.decode_bytes(output).decode()


@pytest.mark.parametrize(
    "source", [r"[a-c]{3,5}", r"(\d{1,3}\.){3}\d{1,3}", "the (lazy )?dog|été 🙂"]
)
def test_only_what_matches_comes_out(compiler, source):
    for seed in range(5):
        text = text_of(compiler, sample(compiler, regex(source), seed))
        assert re.fullmatch(source, text), text


def test_a_choice_is_one_of_its_strings(compiler):
    choices = ["the", "the lazy dog", 'q"uote\n', "été"]
    grammar = Grammar(kind=GrammarKind.CHOICE, source=json.dumps(choices))
    seen = {text_of(compiler, sample(compiler, grammar, seed)) for seed in range(40)}
    assert seen == set(choices)


def test_a_choice_may_have_ten_thousand_strings(compiler):
    choices = [f"answer number {i}" for i in range(10_000)]
    grammar = Grammar(kind=GrammarKind.CHOICE, source=json.dumps(choices))
    for seed in range(3):
        assert text_of(compiler, sample(compiler, grammar, seed)) in choices


def test_a_grammar_may_be_lark_or_gbnf(compiler):
    for source in ('start: "a" b*\nb: "b" | "c"', 'root ::= "a" b*\nb ::= "b" | "c"'):
        text = text_of(compiler, sample(compiler, Grammar(kind=GrammarKind.LARK, source=source), 1))
        assert re.fullmatch("a[bc]*", text)


SCALARS = st.sampled_from(
    [
        {"type": "string", "maxLength": 8},
        {"type": "string", "pattern": "^[a-f0-9]{2,4}$"},
        {"type": "string", "pattern": '^[^"]{1,3}$'},
        {"type": "string", "pattern": r"^[^\\a]{1,3}$", "format": "path"},
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "integer", "minimum": -(2**63), "maximum": 9},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 7, None]},
        {"const": {"a": [1]}},
    ]
)


def _objects(inner):
    fields = st.dictionaries(st.sampled_from("abcde"), inner, min_size=1, max_size=3)
    return fields.map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_sampled_under_a_schema_validates(compiler, wanted, seed):
    text = text_of(compiler, sample(compiler, schema(wanted), seed))
    jsonschema.validate(json.loads(text), wanted)


def test_masks_depend_on_the_output_alone(compiler):
    """Replaying the tokens, at once or one by one, beside others, gives the same mask."""
    grammar = schema({"type": "array", "items": {"enum": ["the", "dog"]}, "maxItems": 5})
    output = sample(compiler, grammar, 3)
    step_by_step = compiler.start(grammar, ends=ENDS)
    for count in range(1, len(output) + 1):
        step_by_step.take([output[count - 1]])
        others = [compiler.start(grammar, ends=ENDS) for _ in range(3)]
        for other in others:
            other.take(output[:1])
        compute_masks([others[0], step_by_step, *others[1:]])
        replayed = compiler.start(grammar, ends=ENDS, output=output[:count])
        assert replayed.mask == step_by_step.mask


def test_the_end_of_a_grammar_allows_the_models_ends_and_nothing_else(compiler):
    matcher = compiler.start(regex("ab?"), ends=ENDS)
    assert not set(ids_of(matcher.mask)) & set(ENDS)
    a, b = compiler._vocabulary.tokenize_str("a"), compiler._vocabulary.tokenize_str("b")
    matcher.take(a)
    compute_masks([matcher])
    assert set(ENDS) < set(ids_of(matcher.mask))
    matcher.take(b)
    compute_masks([matcher])
    assert ids_of(matcher.mask) == sorted(ENDS)
    assert matcher.leaves_any([2])
    assert not matcher.leaves_any([0, 2])


@pytest.mark.parametrize("ends", [(2,), (7,), (3, 9)])
def test_only_the_models_own_ends_are_allowed(compiler, ends):
    """Whatever token the library has been told ends a text, and whatever that token is."""
    matcher = compiler.start(regex("a*"), ends=ends)
    a = compiler._vocabulary.tokenize_str("a")
    for _ in range(3):
        assert {i for i in range(12) if i in ids_of(matcher.mask)} == set(ends)
        matcher.take(a)
        compute_masks([matcher])
    finished = compiler.start(regex("a"), ends=ends, output=a)
    assert ids_of(finished.mask) == sorted(ends)


def test_tokens_outside_the_grammar_are_an_error_of_that_output_alone(compiler):
    good, bad = (compiler.start(regex("aa*"), ends=ENDS) for _ in range(2))
    a, b = (compiler._vocabulary.tokenize_str(text) for text in "ab")
    good.take(a)
    bad.take(b)
    compute_masks([bad, good])
    assert "left its grammar" in bad.error
    assert bad.mask is None
    assert good.mask is not None
    with pytest.raises(InvalidRequest, match="left its grammar"):
        compiler.start(regex("aa*"), ends=ENDS, output=b)


BROKEN = [
    schema({"type": "foo"}),
    schema({"properties": "x"}),
    schema({"properties": {"a": "string"}}),
    schema({"type": "array", "uniqueItems": True}),
    schema({"not": {"type": "string"}}),
    schema({"enum": []}),
    schema({"$ref": "http://localhost/schema.json"}),
    schema({"$ref": "#"}),
    schema({"type": "string", "pattern": "("}),
    schema([]),
    regex("("),
    regex("(?=a)b"),
    regex("a{100}{100}{100}"),
    Grammar(kind=GrammarKind.LARK, source="start: /[/"),
    Grammar(kind=GrammarKind.LARK, source="root ::= ("),
    Grammar(kind=GrammarKind.LARK, source=""),
    Grammar(kind=GrammarKind.CHOICE, source="[]"),
]


@pytest.mark.parametrize("grammar", BROKEN, ids=lambda grammar: grammar.source[:30])
def test_a_wrong_grammar_is_refused_with_and_without_the_models_vocabulary(compiler, grammar):
    small = Compiler(byte_vocabulary({0: "<|endoftext|>", 300: "[CALL]"}))
    for one in (compiler, small):
        for _ in range(2):  # the second answer comes out of what was kept
            with pytest.raises(InvalidRequest) as caught:
                one.start(grammar)
            assert caught.value.message


def test_a_form_that_no_text_has_is_refused_in_words(compiler):
    with pytest.raises(InvalidRequest, match="no text has this form"):
        compiler.start(schema({"$ref": "#"}))


@pytest.mark.parametrize("name", ["<|im_start|>", "<think>", "<s>"])
def test_text_may_be_spelled_like_a_special_token(compiler, name):
    """Where it is the only text that fits, too; the token itself is another thing."""
    made = {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
    for grammar in (
        Grammar(kind=GrammarKind.CHOICE, source=json.dumps([f"a{name}b"])),
        Grammar(kind=GrammarKind.LARK, source=f'start: "a{name}b"'),
        Grammar(kind=GrammarKind.LARK, source=f'root ::= "a{name}b"'),
        regex(re.escape(f"a{name}b")),
        schema(made | {"additionalProperties": False}),
    ):
        output = sample(compiler, grammar, 1)
        assert not any(map(compiler._vocabulary.is_special_token, output))
        text = text_of(compiler, output)
        assert text == f"a{name}b" or json.loads(text) == {name: name}


def test_the_byte_vocabulary_knows_the_special_tokens():
    small = Compiler(byte_vocabulary({0: "<|endoftext|>", 300: "[CALL]"}))
    small.start(Grammar(kind=GrammarKind.LARK, source='start: <[300]> "a" <|endoftext|>'))
    with pytest.raises(InvalidRequest, match="special"):
        small.start(Grammar(kind=GrammarKind.LARK, source="start: <missing>"))


def test_kept_grammars_are_bounded(compiler):
    small = Compiler(byte_vocabulary({0: "<end>"}))
    for i in range(200):
        small.start(regex(f"a{i}"))
    assert len(small._cache) == 64
    assert regex("a199") in small._cache
    assert regex("a0") not in small._cache
