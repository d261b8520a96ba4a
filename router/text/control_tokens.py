"""The spellings of control tokens, which are text inside chat content.

A user who writes `<|im_end|>` must not end the user message and forge another. A placeholder stands
for each control token's spelling while the template runs. Of the prompt, the tokenizer then finds
the control tokens that the template wrote; these get names that no text contains, placeholders
their spellings, and a copy of the tokenizer that knows control tokens by those names alone encodes
the whole. So ids are those of the same text in a tokenizer without these control tokens, whatever
it does at the borders of texts. Prompts without such spellings are encoded once, as they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from router.request.chat_messages import ChatRole


class ControlTokens:
    """The control tokens of one tokenizer. Thread-safe.

    Special tokens are neutralised in all content, added tokens not flagged special (`<think>`) in
    that of users and tools only: an assistant's message may mean them. Runs of spaces and line
    breaks, which are added tokens of some models, are text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = _pattern(token.content for token in added.values() if token.special)
        known = {
            i: token.content
            for i, token in added.items()
            if token.special or token.content.strip(" \n\t\r\u2581")
        }
        self.all = _pattern(known.values())
        self._known = known
        self._nonce = secrets.token_hex(8)
        self._renamed = self._rename()

    def encode(
        self, prompt: str, show: Callable[[str], str], *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """The ids of a prompt with placeholders, which `show` replaces by their spellings."""
        found = self._tokenizer.encode_batch([prompt], add_special_tokens=False)[0]
        parts: list[str] = []
        end = 0
        for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if token in self._known and start >= end:
                # Perhaps with white space that belongs to the token.
                named = prompt[start:stop].replace(self._known[token], self._name(token), 1)
                parts += [prompt[end:start], named]
                end = stop
        text = show("".join([*parts, prompt[end:]]))
        batch = self._renamed.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def _name(self, token: int) -> str:
        return f"\ue000{self._nonce}:{token}\ue001"

    def _rename(self) -> Tokenizer:
        """The tokenizer with other names of control tokens."""
        names = {content: self._name(i) for i, content in self._known.items()}
        spec = json.loads(self._tokenizer.to_str())
        for added in spec["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        _rename_pieces(spec["model"], names)
        return Tokenizer.from_str(json.dumps(spec))


def _rename_pieces(model: dict[str, Any], names: dict[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:  # a unigram model's pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        kept = ([a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b)))
        model["merges"] = list(kept)


class HiddenControlTokens:
    """Those found in one prompt. Placeholders are random, so content cannot contain them."""

    def __init__(self, tokens: ControlTokens) -> None:
        self._tokens = tokens
        self._nonce = ""
        self._found: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._found)

    def hide(self, content: str, role: ChatRole) -> str:
        """`content` with a placeholder for each control token it spells."""
        trusted = role in (ChatRole.SYSTEM, ChatRole.ASSISTANT)
        pattern = self._tokens.special if trusted else self._tokens.all
        if pattern is None or pattern.search(content) is None:
            return content
        self._nonce = self._nonce or secrets.token_hex(8)
        return pattern.sub(self._placeholder, content)

    def encode(self, prompt: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The ids of the prompt, its placeholders replaced by ordinary tokens."""
        return self._tokens.encode(prompt, self._shown, add_special_tokens=add_special_tokens)

    def _placeholder(self, match: re.Match[str]) -> str:
        self._found.append(match.group())
        return f"\ue000{self._nonce}:{len(self._found) - 1}\ue001"

    def _shown(self, prompt: str) -> str:
        placeholders = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")
        return placeholders.sub(lambda match: self._found[int(match[1])], prompt)


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted({token for token in tokens if token}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
