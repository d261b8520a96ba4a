"""Token ids to text: single tokens by themselves; outputs incrementally, searched for stop strings
and cut."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from protocol.states import FinishReason
from router.text.tool_parser import CallDelta, CallParser

_REPLACEMENT = "\ufffd"
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: A character has at most 4 bytes, so more byte tokens will not complete one.
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
        """Add a token. Returns the text that becomes complete."""
        if token >= len(self._table):  # a padding row of the vocabulary has no text
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """U+FFFD when the output ended inside a character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a small window again and returns what is new.

    The window starts one token before the last emitted text, for decoders that depend on the token
    before (leading spaces, byte runs).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0  # leading tokens of the window whose text was returned

    def push(self, token: int) -> str:
        """Add a token. Returns the text that becomes complete."""
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
        """The text held back, at the end."""
        before, after = self._texts()
        self._num_emitted = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._window[: self._num_emitted]) if self._num_emitted else ""
        return before, self._decode(self._window)


#: What `push` and `flush` return, concatenated, is the text of all ids decoded at once. A character
#: whose bytes are incomplete is held back; if the output ends inside one, `flush` gives U+FFFD for
#: it, as decoding at once would.
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


class TextStream:
    """Turns the output tokens of one sequence into text, in order.

    A stop or end token is not part of the text, unless `include_stop`. Stop strings count from the
    first token after `min_tokens`; a match must lie wholly behind it. `tokens` counts every output
    token, `characters` those of their text, cut or not, up to the last complete one. With a
    `parser`, tool calls are taken out of the text; `calls` is what the last token adds to them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int,
        include_stop: bool = False,
        parser: CallParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._parser = parser
        self.tokens = 0
        self.characters = 0
        self.finish: FinishReason | None = None
        self.calls: list[CallDelta] = []

    def push(self, token: int, finish: FinishReason | None) -> str:
        """Add a token. Returns the text that becomes certain; sets `finish` at the end."""
        self.tokens += 1
        hidden = finish is FinishReason.STOP and not self._include_stop
        text = "" if hidden else self._detokenizer.push(token)
        self.characters += len(text)
        if finish is not None:
            text += self._detokenizer.flush()
        if self.tokens > self._min_tokens:
            text = self._stops.push(text)
        if self._stops.matched:
            self.finish = FinishReason.STOP
        elif finish is not None:
            self.finish = finish
            text += self._stops.flush()
        return text if self._parser is None else self._without_calls(text, self._parser)

    def _without_calls(self, text: str, parser: CallParser) -> str:
        text, self.calls = parser.push(text, last=self.finish is not None)
        # A stop string can cut a call short: its arguments are no JSON then.
        if self.finish is FinishReason.STOP and parser.num_calls and not parser.in_arguments:
            self.finish = FinishReason.TOOL_CALLS
        return text


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    Text that may be the start of a stop string is held back; the output is cut exactly before the
    first stop string to be completed, wherever the pieces split. One automaton per stop string
    (Knuth, Morris, Pratt 1977): constant time per character, however long the strings.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the output is cut right behind the stop string instead of before it."""
        self._include = include
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text. Returns what is certain; nothing after a match, which sets `matched`."""
        if self.matched:
            return ""
        if not self._automata:
            return text
        held = self._held + text
        offset = len(self._held)
        for i, char in enumerate(text):
            longest = 0
            for automaton in self._automata:
                if automaton.step(char):
                    longest = max(longest, automaton.length)
            if longest:
                self.matched = True
                self._held = ""
                return held[: offset + i + 1 - (0 if self._include else longest)]
        keep = max(automaton.state for automaton in self._automata)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`state` is the length of the longest prefix of the string that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.state = 0
        self._stop = stop
        self._fallback = _fallbacks(stop)

    def step(self, char: str) -> bool:
        """Add one character. Returns whether the whole string has been seen."""
        state = self.state
        while state and self._stop[state] != char:
            state = self._fallback[state - 1]
        if self._stop[state] == char:
            state += 1
        self.state = state
        return state == self.length


def _fallbacks(stop: str) -> list[int]:
    """fallback[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    fallback = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = fallback[length - 1]
        if stop[i] == stop[length]:
            length += 1
        fallback[i] = length
    return fallback
