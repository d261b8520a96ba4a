"""Finding stop strings in a text that arrives in pieces.

Text that may turn out to be the start of a stop string is held back; the output is cut exactly
before the first stop string to be completed, wherever the pieces split. One Knuth-Morris-Pratt
automaton per stop string (Knuth, Morris, Pratt 1977): constant time per character, however long
the strings.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it text; it says what may be shown and whether a stop string was found."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the output is cut right behind the stop string instead of before it."""
        self._include = include
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Text that is safe to show. After a match `matched` is true and nothing more comes out."""
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
        """The held text, once no more can come."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`state` is the length of the longest start of the string that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.state = 0
        self._stop = stop
        self._fallback = _fallbacks(stop)

    def step(self, char: str) -> bool:
        """Take one character; whether the whole string has now been seen."""
        state = self.state
        while state and self._stop[state] != char:
            state = self._fallback[state - 1]
        if self._stop[state] == char:
            state += 1
        self.state = state
        return state == self.length


def _fallbacks(stop: str) -> list[int]:
    """fallback[i]: the longest proper start of stop[: i + 1] that is also its end."""
    fallback = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = fallback[length - 1]
        if stop[i] == stop[length]:
            length += 1
        fallback[i] = length
    return fallback
