"""Token ids to text: incrementally without half characters, and single tokens by themselves.

The pieces of an incremental decoder concatenated (the last `flush` included) are the text of all
ids decoded at once. A character whose bytes are incomplete is held back; if the output ends inside
one, `flush` gives U+FFFD for it, as decoding at once would.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_SPELLED = _REPLACEMENT.encode()
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: A character has at most 4 bytes, so more byte tokens will not complete one.
_MAX_HELD_TOKENS = 8


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): each id stands for fixed bytes.

    `table[id]` are the bytes of an id, empty for special tokens. Exact, and constant time per
    token.
    """

    def __init__(self, table: Sequence[bytes], *, prompt: Sequence[int] = ()) -> None:
        """The output goes on where `prompt` ends, within a character perhaps."""
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._inside = False  # of a character whose bytes are incomplete
        for token in prompt[-_MAX_HELD_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """Add a token. Returns the text that becomes complete."""
        if token >= len(self._table):  # a padding row of the vocabulary has no text
            return ""
        data = self._table[token]
        if data.isascii() and not self._inside:
            return data.decode("ascii")  # a third of the decoder's time
        text = self._decoder.decode(data)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD when the output ended inside a character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a small window again and returns what is new.

    The window starts one token before the last emitted text, for decoders that depend on the token
    before (leading spaces, byte runs); at first with the end of `prompt`, which the output goes on.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        prompt: Sequence[int] = (),
        table: TokenTable | None = None,
    ) -> None:
        """`table`: tells U+FFFD that tokens spell from what decoders give for half a character."""
        self._decode = decode
        self._table = table
        self._window = _end_of(prompt, decode)
        #: Leading tokens whose text was returned: not that of a character in which a prompt ends.
        self._num_emitted = self._num_whole()

    def push(self, token: int) -> str:
        self._window.append(token)
        held = len(self._window) - self._num_emitted
        before, after = self._texts()
        if after == before and held >= _MAX_HELD_TOKENS:
            del self._window[self._num_emitted :]  # special tokens: there may be thousands
        new = _added(before, after)
        if not new or (held < _MAX_HELD_TOKENS and not self._is_whole(self._window, after)):
            return ""
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        return new

    def flush(self) -> str:
        before, after = self._texts()
        self._num_emitted = len(self._window)
        return _added(before, after)

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._window[: self._num_emitted]) if self._num_emitted else ""
        return before, self._decode(self._window)

    def _is_whole(self, ids: list[int], text: str) -> bool:
        """Whether the text of these tokens ends with a character."""
        if self._table is None or not text.endswith(_REPLACEMENT):
            return not text.endswith(_REPLACEMENT)
        return b"".join(self._table[i].data for i in ids[-len(_SPELLED) :]).endswith(_SPELLED)

    def _num_whole(self) -> int:
        """Leading tokens whose text ends with a character; all where that of none could."""
        ids = self._window
        counts = range(len(ids), max(-1, len(ids) - _MAX_HELD_TOKENS), -1)
        whole = (n for n in counts if not n or self._is_whole(ids[:n], self._decode(ids[:n])))
        return next(whole, len(ids))


def _added(before: str, after: str) -> str:
    """What a text has become longer by; a character that was incomplete counts as added."""
    if before.endswith(_REPLACEMENT):
        pairs = zip(before, after, strict=False)
        return after[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    return after[len(before) :]


def _end_of(prompt: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The last tokens of a prompt, so many that they have text that begins with a character."""
    size = _MAX_HELD_TOKENS
    while True:
        end = list(prompt[-size:])
        text = decode(end)
        if size >= len(prompt) or (text and not text.startswith(_REPLACEMENT)):
            return end
        size *= 4


Detokenizer = ByteDetokenizer | WindowDetokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    r"""One token. `text` is its text, or OpenAI's `bytes:\xe2\x96` where its bytes are not UTF-8
    by themselves; special tokens are written out."""

    text: str
    data: bytes

    def begins(self, before: int, after: int) -> int:
        """Where the text of this token begins, in characters, when it made the whole text grow from
        `before` to `after`: incomplete bytes in front of it are U+FFFD now."""
        return max(before, after - len(self.text))

    @staticmethod
    def of(data: bytes) -> TokenText:
        try:
            return TokenText(text=data.decode(), data=data)
        except UnicodeDecodeError:
            return TokenText(text="bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data=data)


class TokenTable:
    """The tokens of a vocabulary by themselves, made on first use. `table[id]` are the bytes of an
    id if the tokenizer is byte-level; special tokens may be empty there."""

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
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = TokenText.of(self._bytes(token))
        return known

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if self._table is not None:
            return self._table[token] if token < len(self._table) else b""
        name = self._tokenizer.id_to_token(token)
        if name is None:  # a padding row of the vocabulary
            return b""
        byte = _BYTE_NAME.fullmatch(name)
        if byte is not None:
            return bytes.fromhex(byte.group(1))
        # Behind another token, because decoders drop the space before the first one.
        text: str = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return text[len(self._anchor_text) :].encode()


def byte_table(tokens: Sequence[str | None]) -> list[bytes]:
    """Bytes of each id of a byte-level vocabulary; `tokens[id]` is None for special or unused ids.

    GPT-2 writes each byte as a printable character; a token with any other character (an added one)
    stands for its own UTF-8.
    """
    alphabet = _byte_alphabet()
    return [b"" if token is None else _token_bytes(token, alphabet) for token in tokens]


def _token_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    values = [alphabet.get(char) for char in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible map (Radford et al. 2019): printable Latin-1 stands for itself, every
    other byte, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
