"""Which tokens a sequence has so far, as far as its penalties look at them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from protocol.sampling import SamplingParams


class TokenHistory:
    """Counts of one sequence's tokens, kept up token by token, and packed: every step takes them,
    of prompts with thousands of different tokens, too.

    They follow from prompt and output alone, so a preempted or resumed sequence has the same.
    """

    def __init__(
        self, prompt: Iterable[int], output: Iterable[int], params: SamplingParams
    ) -> None:
        """Presence and frequency penalties look at the output only, repetition at both."""
        looked_at = prompt if params.repetition_penalty != 1.0 else ()
        self._tokens = array("i", dict.fromkeys(looked_at))
        self._counts = array("i", bytes(4 * len(self._tokens)))
        self._places = {token: place for place, token in enumerate(self._tokens)}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def seen(self) -> bytes:
        """The different tokens, in order of appearance: int32."""
        return self._tokens.tobytes()

    def counts(self) -> bytes:
        """How often each token of `seen` is in the output: int32."""
        return self._counts.tobytes()
