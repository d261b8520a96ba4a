"""The router's text side against transformers, on the real small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from router.text.tokenizer import ModelText
from tests.support.tiny_text import smollm2_folder
from tests.support.typed_requests import chat_messages

CHATS = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "你好 🙂"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": " spaces \n\n and lines "},
    ],
]


TEXTS = ["", " ", "hello world", "你好 🙂 e\u0301", "<|im_start|>user\nhi<|im_end|>\n", "a" * 5000]


@pytest.fixture(scope="module")
def folder() -> Path:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("smollm2-135m is not there; run: baton models get smollm2-135m")
    return folder


@pytest.mark.parametrize("chat", CHATS)
def test_chat_ids_are_those_of_apply_chat_template(folder: Path, chat: list[dict]) -> None:
    oracle = AutoTokenizer.from_pretrained(str(folder))
    expected = oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(ModelText(folder).encode_chat(chat_messages(chat))) == list(expected)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_the_tokenizer(folder: Path, text: str) -> None:
    oracle = AutoTokenizer.from_pretrained(str(folder))
    model = ModelText(folder)
    ids = list(model.encode(text))
    assert ids == oracle(text)["input_ids"]
    assert model.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    detokenizer = model.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == model.decode(ids)
