"""The blocks of decode that transfers may write, each under one generation at a time. Pure."""

from __future__ import annotations

from kv_transfer.plan.states import GRANT_TRANSITIONS, GrantState, advance
from protocol.errors import Internal


class BlockGrants:
    """Grants blocks under generations and takes them back. A block is never in two grants at once,
    and never granted while a write to it may be in flight."""

    def __init__(self) -> None:
        self._next = 1
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._states: dict[int, GrantState] = {}
        self._held: set[int] = set()

    def grant(self, blocks: tuple[int, ...]) -> int:
        """Put writable blocks under a generation that was never used before; returns it. Raises
        Internal, changing nothing, when one of them is granted or quarantined already."""
        together = len(self._held) + len(blocks)
        self._held.update(blocks)
        if len(self._held) != together:
            self._held = set().union(*self._blocks.values())
            raise self._refusal(blocks)
        generation = self._next
        self._next += 1
        self._blocks[generation] = blocks
        self._states[generation] = GrantState.GRANTED
        return generation

    def quarantine(self, generation: int) -> None:
        """No more writes are accepted; one may be in flight."""
        self._advance(generation, GrantState.QUARANTINED)

    def close(self, generation: int) -> None:
        """Forget a generation: its blocks are committed, or safe."""
        self._advance(generation, GrantState.CLOSED)
        self._held.difference_update(self._blocks.pop(generation))
        del self._states[generation]

    def num_blocks(self, state: GrantState) -> int:
        return sum(len(self._blocks[g]) for g, found in self._states.items() if found is state)

    def _advance(self, generation: int, target: GrantState) -> None:
        current = self._states.get(generation, GrantState.CLOSED)
        self._states[generation] = advance(GRANT_TRANSITIONS, current, target)

    def _refusal(self, blocks: tuple[int, ...]) -> Internal:
        for generation, own in self._blocks.items():
            for block in set(own).intersection(blocks):
                return Internal(
                    f"block {block} is {self._states[generation]} in generation {generation} and "
                    "cannot be granted again"
                )
        return Internal("a block is named twice in one grant")
