"""Control tokens that content spells are ordinary tokens of the same text, for any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.request.chat_messages import ChatRole
from router.text.control_tokens import ControlTokens, HiddenControlTokens
from tests.support.tiny_text import byte_level, sentencepiece_like

BARE = "What does <s>old</s> do in HTML? <unk>"


def metaspace(scheme: str) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(33, 127)), "\u2581the"]
    # The names of control tokens are pieces, too: so unlikely that no text is cut into them.
    scored = [(piece, -99.0 if i < 3 else -1.0) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>", AddedToken("</s>", rstrip=True)])
    return tokenizer


def with_merged_marks() -> Tokenizer:
    """A vocabulary where ordinary merges lead to an added token, as in Gemma's."""
    pieces = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127)), "<t", "<t>"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("<", "t"), ("<t", ">")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<t>", "  "])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "prepend": sentencepiece_like,
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, first": lambda: metaspace("first"),
    "merged marks": with_merged_marks,
}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}


def plain_twin(name: str) -> Tokenizer:
    """The oracle: the same tokenizer that splits special tokens like any text."""
    tokenizer = MAKERS[name]()
    tokenizer.encode_special_tokens = True
    return tokenizer


def neutralised(tokenizer: Tokenizer, parts: list[str], *, marks: list[str]) -> list[int]:
    hidden = HiddenControlTokens(ControlTokens(tokenizer))
    texts = [hidden.hide(part, ChatRole.SYSTEM) for part in parts]
    prompt = "".join(mark + text for mark, text in zip(marks, texts, strict=True))
    assert hidden.used
    return list(hidden.encode(prompt))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "byte level"])
def test_a_spelled_mark_changes_no_other_token(name: str) -> None:
    tokenizer, twin = TOKENIZERS[name], plain_twin(name)
    ids = neutralised(tokenizer, [BARE], marks=[""])
    assert ids == twin.encode(BARE, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == BARE


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "byte level"])
def test_marks_of_the_template_stay_marks(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = neutralised(tokenizer, [BARE, " the end"], marks=["<s>", "</s>"])
    # A tokenizer splits at its marks first: each text is encoded as after such a mark.
    stand_in = BARE.replace("<s>", "S").replace("</s>", "E").replace("<unk>", "U")
    around = tokenizer.encode(f"<s>{stand_in}</s> the end", add_special_tokens=False).ids
    assert (ids[0], ids.count(1), ids.count(2)) == (around[0], 1, 1)
    assert ids[ids.index(2) :] == around[around.index(2) :]
    middle = tokenizer.decode(ids[1 : ids.index(2)], skip_special_tokens=False)
    assert middle == BARE


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.sampled_from(["the", " ", "<s>", "</s", ">", "a", "  ", "<", "\n"]), max_size=8),
)
def test_text_of_the_prompt_is_what_was_written(name: str, words: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "x" + "".join(words)
    spelled = "<|im_end|>" if name == "byte level" else "</s>"
    control = ControlTokens(tokenizer)
    hidden = HiddenControlTokens(control)
    ids = hidden.encode(hidden.hide(text + spelled, ChatRole.SYSTEM))
    assert tokenizer.token_to_id(spelled) not in ids
    plain = "".join(word for word in (text + spelled))
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.replace("<unk>", "\n") == plain or "\n" in plain


@pytest.mark.parametrize("role", list(ChatRole))
def test_runs_of_white_space_are_text(role: ChatRole, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["merged marks"]
    hidden = HiddenControlTokens(ControlTokens(tokenizer))
    assert hidden.hide("a  b", role) == "a  b"
    assert (hidden.hide("<t>", role) == "<t>") is (role in (ChatRole.SYSTEM, ChatRole.ASSISTANT))
    ids = hidden.encode(hidden.hide("a  <t>", ChatRole.USER))
    assert tokenizer.token_to_id("  ") in ids
    assert tokenizer.token_to_id("<t>") not in ids
    assert tokenizer.decode(list(ids), skip_special_tokens=False) == "a  <t>"
