"""Streamed text, concatenated, is the text of all ids decoded at once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.text.tokenizer import ModelText
from tests.support.tiny_text import sentencepiece_like, write_model_text

HARD_TEXTS = [
    "plain words only",
    "🙂",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 skin tone",
    "你好世界。今天天气很好",
    "こんにちは世界 안녕하세요 세계",
    "e\u0301te\u0301 n\u0303 a\u0308\u0323 combining",
    "नमस्ते ते ﷽ שלום",
    " leading and trailing ",
    "tabs\tand\nlines\r\n\n\n",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \ufeff\u200b\u2028",
]


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("sample", HARD_TEXTS)
def test_hard_texts_survive_token_by_token(text: ModelText, sample: str) -> None:
    ids = list(text.encode(sample))
    pieces = stream(text.detokenizer(), ids)
    assert "".join(pieces) == sample == text.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=80, deadline=None)
@given(sample=st.text(max_size=40))
def test_any_text_survives(text: ModelText, sample: str) -> None:
    ids = list(text.encode(sample, add_special_tokens=False))
    assert "".join(stream(text.detokenizer(), ids)) == text.decode(ids)


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_any_ids_even_broken_characters_equal_the_full_decode(
    text: ModelText, ids: list[int]
) -> None:
    assert "".join(stream(text.detokenizer(), ids)) == text.decode(ids)


def test_a_half_character_is_held_back_and_flushed_as_one_replacement(text: ModelText) -> None:
    ids = list(text.encode("a🙈"))
    detokenizer = text.detokenizer()
    pieces = [detokenizer.push(i) for i in ids[:-1]]
    assert "".join(pieces) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_and_padding_rows_have_no_text(text: ModelText) -> None:
    detokenizer = text.detokenizer()
    assert [detokenizer.push(i) for i in (0, 1, 2, 511, 100_000)] == [""] * 5


def test_added_tokens_that_are_not_special_are_text(text: ModelText) -> None:
    ids = list(text.encode("<think>hm", add_special_tokens=False))
    assert "".join(stream(text.detokenizer(), ids)) == "<think>hm"


@cache
def _smollm2(folder: Path) -> ModelText:
    return ModelText(folder)


@settings(max_examples=50, deadline=None)
@given(sample=st.text(max_size=60))
def test_smollm2_text(smollm2: Path, sample: str) -> None:
    model = _smollm2(smollm2)
    ids = list(model.encode(sample))
    assert "".join(stream(model.detokenizer(), ids)) == model.decode(ids)


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_smollm2_ids(smollm2: Path, ids: list[int]) -> None:
    model = _smollm2(smollm2)
    assert "".join(stream(model.detokenizer(), ids)) == model.decode(ids)


@pytest.mark.parametrize("sample", HARD_TEXTS)
def test_smollm2_uses_the_byte_table(smollm2: Path, sample: str) -> None:
    model = _smollm2(smollm2)
    detokenizer = model.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    assert "".join(stream(detokenizer, list(model.encode(sample)))) == sample


@cache
def _pieces() -> Tokenizer:
    return sentencepiece_like()


@settings(max_examples=80, deadline=None)
@given(sample=st.text(max_size=30))
def test_window_decoding_of_a_sentencepiece_like_tokenizer(sample: str) -> None:
    tokenizer = _pieces()
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    detokenizer = WindowDetokenizer(lambda window: tokenizer.decode(window))
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("sample", ["the fox the", "好 the 你好 🙂 dog"])
def test_window_decoding_holds_back_unfinished_bytes(sample: str) -> None:
    tokenizer = _pieces()
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    pieces = stream(WindowDetokenizer(lambda window: tokenizer.decode(window)), ids)
    assert "".join(pieces) == sample
    assert not any("\ufffd" in piece for piece in pieces)


def test_window_decoding_does_not_hold_garbage_for_ever() -> None:
    tokenizer = _pieces()
    detokenizer = WindowDetokenizer(lambda window: tokenizer.decode(window))
    lone_byte = tokenizer.token_to_id("<0xFF>")
    assert any(detokenizer.push(lone_byte) for _ in range(20))


def test_window_decoding_keeps_no_tokens_without_text() -> None:
    """As many as a client likes, and each would be decoded again with every one after it."""
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["</s>"])
    fox, end = tokenizer.encode("the fox").ids, [tokenizer.token_to_id("</s>")]
    most = 0

    def decode(window: list[int]) -> str:
        nonlocal most
        most = max(most, len(window))
        return tokenizer.decode(window)

    for ids in (end * 200 + fox, fox + end * 200 + fox, fox[:1] + end * 8 + fox):
        assert "".join(stream(WindowDetokenizer(decode), ids)) == tokenizer.decode(ids)
    assert most <= 16


CODE = "def f():\n    return 1\n\tthe  end 🙂 é"


@pytest.mark.parametrize("cut", range(0, 60, 3))
@pytest.mark.parametrize("bos", [True, False])
def test_an_output_goes_on_behind_its_prompt(tmp_path: Path, cut: int, bos: bool) -> None:
    """Prompt and output together are the text of all ids: decoders drop a space at a start only."""
    write_model_text(tmp_path, tokenizer=sentencepiece_like())
    text = ModelText(tmp_path)
    ids = [1] * bos + list(text.encode(CODE, add_special_tokens=False))
    prompt, output = ids[:cut], ids[cut:]
    shown = text.decode(prompt).rstrip("\ufffd")  # the prompt may end within a character
    assert shown + "".join(stream(text.detokenizer(prompt=prompt), output)) == text.decode(ids)


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30), cut=st.integers(0, 30))
def test_a_text_that_is_taken_up_again_goes_on_exactly(
    text: ModelText, ids: list[int], cut: int
) -> None:
    """The rest of an output, behind the tokens whose text was read: no byte is lost between."""
    begun = text.detokenizer()
    read = "".join(begun.push(token) for token in ids[:cut])
    rest = stream(text.detokenizer(prompt=ids[:cut]), ids[cut:])
    assert read + "".join(rest) == text.decode(ids)


@settings(max_examples=80, deadline=None)
@given(sample=st.text("the fox 好你🙂é", min_size=2, max_size=20), data=st.data())
def test_window_decoding_is_taken_up_again_within_a_character(
    sample: str, data: st.DataObject
) -> None:
    """Bytes in a row are decoded at once: none is whole while their last character is not."""
    tokenizer = _pieces()
    fox, ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("fox", sample))
    cut = data.draw(st.integers(0, len(ids)))
    begun = WindowDetokenizer(tokenizer.decode, prompt=fox)
    read = "".join(begun.push(token) for token in ids[:cut])
    rest = stream(WindowDetokenizer(tokenizer.decode, prompt=fox + ids[:cut]), ids[cut:])
    assert read + "".join(rest) == tokenizer.decode(fox + ids).removeprefix(tokenizer.decode(fox))


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.text("fx 好\ufffdé", max_size=6),
    output=st.text("fx 好\ufffdé", max_size=6),
    has_piece=st.booleans(),
)
def test_an_output_repeats_no_replacement_character_of_its_prompt(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, output: str, has_piece: bool
) -> None:
    """Written out, in bytes or as a piece, it is no character that goes on."""
    tokenizer = sentencepiece_like()
    if has_piece:
        tokenizer.add_tokens(["\ufffd"])
    text = ModelText(write_model_text(tmp_path_factory.mktemp("text"), tokenizer=tokenizer))
    begun, rest = (list(text.encode(part, add_special_tokens=False)) for part in (prompt, output))
    added = "".join(stream(text.detokenizer(prompt=begun), rest))
    assert text.decode(begun) + added == text.decode(begun + rest)
