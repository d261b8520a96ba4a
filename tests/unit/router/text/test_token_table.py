"""Single tokens as text and bytes, and where each begins in a prompt that is shown again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import TokenText
from router.text.tokenizer import ModelText
from tests.support.tiny_text import byte_level, sentencepiece_like, write_model_text


@pytest.fixture(scope="module", params=["byte level", "with a BOS", "sentencepiece"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    tokenizers = {
        "byte level": byte_level(),
        "with a BOS": byte_level(bos=True),
        "sentencepiece": sentencepiece_like(),
    }
    folder: Path = tmp_path_factory.mktemp("model")
    return ModelText(write_model_text(folder, tokenizer=tokenizers[request.param]))


TEXTS = st.text(alphabet=st.sampled_from("the dog é好🙂\u0301 \n"), min_size=1, max_size=30)


@given(text=TEXTS)
def test_bytes_of_the_tokens_of_a_text_are_those_of_the_text(model: ModelText, text: str) -> None:
    ids = model.encode(text, add_special_tokens=False)
    data = b"".join(model.token_table[token].data for token in ids)
    assert data.decode() in (text, " " + text), "sentencepiece puts a space before it"
    for token in ids:
        piece = model.token_table[token]
        assert piece == TokenText.of(piece.data)
        if not piece.text.startswith("bytes:"):
            assert piece.text.encode() == piece.data


@given(text=TEXTS)
def test_offsets_are_where_tokens_begin(model: ModelText, text: str) -> None:
    ids = model.encode(text)
    shown = model.show(text, ids, skip_special_tokens=True)
    assert shown.text == text
    assert len(shown.offsets) == len(ids)
    assert list(shown.offsets) == sorted(shown.offsets)
    for token, offset in zip(ids, shown.offsets, strict=True):
        piece = model.token_table[token].text
        if not piece.startswith(("bytes:", "<|", " ")):
            assert text[offset:].startswith(piece)


@given(text=TEXTS)
def test_ids_are_shown_as_they_decode(model: ModelText, text: str) -> None:
    ids = model.encode(text)
    for skip in (True, False):
        shown = model.show(ids, ids, skip_special_tokens=skip)
        assert shown.text == model.decode(ids, skip_special_tokens=skip)
        assert max(shown.offsets) <= len(shown.text)


@given(ids=st.lists(st.integers(0, 300), min_size=1, max_size=24))
def test_offsets_of_any_ids_are_where_tokens_begin(model: ModelText, ids: list[int]) -> None:
    """Bytes that become no character come before what follows them, too."""
    shown = model.show(ids, ids, skip_special_tokens=False)
    assert list(shown.offsets) == sorted(shown.offsets)
    for token, offset in zip(ids, shown.offsets, strict=True):
        piece = model.token_table[token]
        if len(piece.data) > 1 and not piece.text.startswith("bytes:"):
            assert shown.text[offset:].startswith((piece.text, piece.text.lstrip(" ")))


def test_special_and_missing_ids(model: ModelText) -> None:
    assert model.token_table[1].text in ("<|im_start|>", "<s>")
    assert model.token_table[model.vocab_size - 1] == TokenText(text="", data=b"")
    assert TokenText.of("🙂".encode()[:2]).text == "bytes:\\xf0\\x9f"
