"""Token ids to text, one at a time, without half characters.

Whatever the split into tokens, the pieces concatenated (the last `flush` included) are the text of
all ids decoded at once; special tokens are left out. A character whose bytes are not all there yet
is held back; if the output ends inside one, `flush` gives U+FFFD for it, as decoding at once
would.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
#: A character has at most 4 bytes; byte-wise tokens beyond that are not going to become one.
_MAX_HELD_TOKENS = 8


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): each id stands for fixed bytes.

    `table[id]` are the bytes of an id, empty for special tokens. Exact, and constant time per
    token.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token."""
        if token >= len(self._table):  # a padding row of the vocabulary has no text
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """U+FFFD when the output ended inside a character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a small window again and takes what is new.

    The window starts one token before what was last emitted, so that decoders which look at their
    neighbour (leading spaces, byte runs) see it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0  # leading tokens of the window whose text is out already

    def push(self, token: int) -> str:
        """The text that is complete with this token."""
        self._window.append(token)
        held = len(self._window) - self._num_emitted
        before, after = self._texts()
        if after == before and held >= _MAX_HELD_TOKENS:
            del self._window[self._num_emitted :]  # special tokens: there may be thousands
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS):
            return ""
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        """What was held back."""
        before, after = self._texts()
        self._num_emitted = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._window[: self._num_emitted]) if self._num_emitted else ""
        return before, self._decode(self._window)


Detokenizer = ByteDetokenizer | WindowDetokenizer


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
