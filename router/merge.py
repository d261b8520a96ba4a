"""Tokens of one output, in order, each exactly once, over two workers and any attempts."""

from __future__ import annotations

from protocol.states import FinishReason


class TokenMerger:
    """Token 1 comes from prefill and the rest from decode, on two streams that race.

    A token that is early waits for those before it; one that was already taken is dropped.
    """

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self._early: dict[int, tuple[int, FinishReason | None]] = {}

    def add(
        self, index: int, token: int, finish: FinishReason | None
    ) -> list[tuple[int, FinishReason | None]]:
        """Take one token; the tokens that are now in order."""
        if index != len(self.output_ids):
            if index > len(self.output_ids):
                self._early[index] = (token, finish)
            return []
        self.output_ids.append(token)
        ready = [(token, finish)]
        while self._early:
            following = self._early.pop(len(self.output_ids), None)
            if following is None:
                break
            self.output_ids.append(following[0])
            ready.append(following)
        return ready

    def restart(self) -> None:
        """A new attempt begins: what was early will be sent again."""
        self._early.clear()
