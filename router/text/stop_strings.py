"""Stop strings: found in a text that arrives in pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    Pieces that may hold the start of a stop string are held back whole, so that a client whose
    stream breaks can go on behind the tokens that it has. The output is cut exactly before the
    first stop string to be completed, wherever the pieces split. One automaton per stop string
    (Knuth, Morris, Pratt 1977): constant time per character, however long the strings.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the output is cut right behind the stop string instead of before it."""
        self._include = include
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self._ends: list[int] = []  # of the held pieces
        self._hidden: list[tuple[int, int]] = []  # parts of the held text that are not shown
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        """Pieces that are held back."""
        return len(self._ends)

    def push(self, text: str, hidden: str = "") -> str:
        """Add text, and behind it hidden text, which matches and is not returned unless it is part
        of an included stop string.

        Returns what is certain; nothing after a match, which sets `matched`.
        """
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        offset = len(self._held)
        added = text + hidden
        self._held += added
        self._ends.append(len(self._held))
        if hidden:
            self._hidden.append((offset + len(text), len(self._held)))
        for i, char in enumerate(added, start=offset + 1):
            found = [automaton.stop for automaton in self._automata if automaton.step(char)]
            if found:
                self.matched = max(found, key=len)
                text = self._release(i - len(self.matched))
                self._held, self._ends = "", []
                return text + (self.matched if self._include else "")
        certain = len(self._held) - max(one.state for one in self._automata)
        num_whole = bisect_right(self._ends, certain)
        if not num_whole:
            return ""
        cut = self._ends[num_whole - 1]
        self._ends = [end - cut for end in self._ends[num_whole:]]
        return self._release(cut)

    def flush(self) -> str:
        """The text held back, at the end."""
        self._ends = []
        return self._release(len(self._held))

    def _release(self, cut: int) -> str:
        """Hold only what is behind `cut`; returns what is shown of the rest."""
        text, self._held = self._held[:cut], self._held[cut:]
        if not self._hidden:
            return text
        shown, end = [], 0
        for start, stop in self._hidden:
            shown.append(text[end:start])
            end = stop
        shown.append(text[end:])
        self._hidden = [(max(0, a - cut), b - cut) for a, b in self._hidden if b > cut]
        return "".join(shown)


class _Automaton:
    """`state` is the length of the longest prefix of the string that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def step(self, char: str) -> bool:
        """Add one character. Returns whether the whole string has been seen."""
        state = self.state
        while state and self.stop[state] != char:
            state = self._fallback[state - 1]
        if self.stop[state] == char:
            state += 1
        self.state = state
        return state == len(self.stop)


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
