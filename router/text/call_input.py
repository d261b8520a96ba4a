"""Text that arrives in pieces, for readers written as if it were there.

Readers are generators: what needs text that has not come yet yields, and goes on with the next
piece. So what they read does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TypeVar

T = TypeVar("T")
#: A reader: yields while it waits for text, returns its result.
Reading = Generator[None, None, T]


class EndOfText(Exception):
    """The text ended where a reader needs more."""


class CallInput:
    """The text that is not read yet; `at` is where the reader looks in it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def add(self, text: str, *, last: bool) -> None:
        self.text += text
        self.ended = last

    def more(self) -> Reading[None]:
        """Wait for more text. Raises EndOfText when there is none."""
        if self.ended:
            raise EndOfText
        yield

    def drop(self) -> None:
        """Forget the text in front of `at`."""
        self.text = self.text[self.at :]
        self.at = 0

    def rest(self) -> Reading[str]:
        """The text from `at` on that has come, at least a character."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at :]

    def char(self) -> Reading[str]:
        """The character at `at`."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def spaces(self) -> Reading[None]:
        """Move behind white space."""
        while (yield from self.char()).isspace():
            self.at += 1

    def literal(self, wanted: str) -> Reading[bool]:
        """Move behind `wanted` if it is there."""
        while not self.text.startswith(wanted, self.at):
            there = self.text[self.at :]
            if len(there) >= len(wanted) or not wanted.startswith(there):
                return False
            yield from self.more()
        self.at += len(wanted)
        return True

    def word(self, extra: Collection[str] = "_-") -> Reading[str]:
        """The letters, digits and `extra` characters from `at` on; moves behind them."""
        start = self.at
        while (char := (yield from self.char())).isalnum() or char in extra:
            self.at += 1
        return self.text[start : self.at]

    def before(self, *ends: str) -> Reading[tuple[str, str]]:
        """The text up to the first of these ends, and that end; moves behind it."""
        start = self.at
        while True:
            found = [(at, end) for end in ends if (at := self.text.find(end, self.at)) >= 0]
            if found:
                at, end = min(found)
                self.at = at + len(end)
                return self.text[start:at], end
            self.at = max(self.at, len(self.text) - max(map(len, ends)) + 1)
            yield from self.more()

    def quoted(self) -> Reading[str | None]:
        """A JSON string with its quotes; None when there is none."""
        start = self.at
        if not (yield from self.literal('"')):
            return None
        while (char := (yield from self.char())) != '"':
            self.at += 2 if char == "\\" else 1
        self.at += 1
        return self.text[start : self.at]


def held(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


class ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces; `depth` objects are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of `text` belong to it; None when it does not end there."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                else:
                    self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None
