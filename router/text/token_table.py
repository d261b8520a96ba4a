"""Single tokens as text and bytes, for answers that list tokens one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    r"""One token. `text` is its text, or OpenAI's `bytes:\xe2\x96` where its bytes are not UTF-8
    by themselves; special tokens are written out."""

    text: str
    data: bytes

    def begins(self, before: int, after: int) -> int:
        """Where the text of this token begins, in characters, when it took the text of all from
        `before` to `after`: bytes in front of it that have become no character are U+FFFD now."""
        return max(before, after - len(self.text))

    @staticmethod
    def of(data: bytes) -> TokenText:
        """The piece of some bytes."""
        try:
            return TokenText(text=data.decode(), data=data)
        except UnicodeDecodeError:
            return TokenText(text="bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data=data)


class TokenTable:
    """The pieces of a vocabulary, looked up on first use. `table[id]` are the bytes of an id where
    the tokenizer is byte-level; special tokens may be empty there."""

    def __init__(self, tokenizer: Tokenizer, table: list[bytes] | None) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._added = {
            i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text: str = tokenizer.decode(self._anchor)
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = TokenText.of(self._bytes(token))
        return piece

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if self._table is not None:
            return self._table[token] if token < len(self._table) else b""
        name = self._tokenizer.id_to_token(token)
        if name is None:  # a padding row of the vocabulary
            return b""
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            return bytes.fromhex(byte.group(1))
        # Behind another token, because decoders drop the space before the first one.
        text: str = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return text[len(self._anchor_text) :].encode()
