"""Which tokens a sequence has so far, as far as its penalties look at them."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.sampling import SamplingParams


class TokenHistory:
    """Counts of one sequence's tokens, kept up token by token.

    They follow from prompt and output alone, so a preempted or resumed sequence has the same.
    """

    def __init__(
        self, prompt: Iterable[int], output: Iterable[int], params: SamplingParams
    ) -> None:
        """Presence and frequency penalties look at the output only, repetition at both."""
        looked_at = prompt if params.repetition_penalty != 1.0 else ()
        self._counts = dict.fromkeys(looked_at, 0)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more output token."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def seen(self) -> tuple[int, ...]:
        """The different tokens, in order of appearance."""
        return tuple(self._counts)

    def counts(self) -> tuple[int, ...]:
        """How often each token of `seen` is in the output."""
        return tuple(self._counts.values())
