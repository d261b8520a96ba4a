"""Tokens of one output, in order, each exactly once, over two workers and any attempts."""

from __future__ import annotations

from protocol.messages import TokenEvent


class TokenMerger:
    """Token 1 comes from prefill and the rest from decode, on two streams that race.

    A token that is early waits for those before it; one that was already taken is dropped.
    """

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self._early: dict[int, TokenEvent] = {}

    def add(self, event: TokenEvent) -> list[TokenEvent]:
        """Take one token; the tokens that are now in order."""
        if event.index != len(self.output_ids):
            if event.index > len(self.output_ids):
                self._early[event.index] = event
            return []
        self.output_ids.append(event.token)
        ready = [event]
        while self._early:
            following = self._early.pop(len(self.output_ids), None)
            if following is None:
                break
            self.output_ids.append(following.token)
            ready.append(following)
        return ready

    def restart(self) -> None:
        """A new attempt begins: what was early will be sent again."""
        self._early.clear()
