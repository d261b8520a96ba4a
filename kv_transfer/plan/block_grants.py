"""Decode's account of the blocks that transfers may write: each belongs to one generation at a
time. Pure."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import Internal


class Holding(StrEnum):
    """Why blocks are in the account."""

    GRANTED = "granted"  # a hand-off may write them
    QUARANTINED = "quarantined"  # none may, but a write may still be in flight


class BlockGrants:
    """Grants blocks to generations and takes them back. A block is never in two grants at once, and
    never granted while a write to it may be in flight."""

    def __init__(self) -> None:
        self._next = 1
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._holding: dict[int, Holding] = {}
        self._held: set[int] = set()

    def grant(self, blocks: tuple[int, ...]) -> int:
        """Put writable blocks under a generation that was never used before; returns it. Raises
        Internal, changing nothing, when one of them is in the account already."""
        together = len(self._held) + len(blocks)
        self._held.update(blocks)
        if len(self._held) != together:
            self._held = set().union(*self._blocks.values())
            raise self._refusal(blocks)
        generation = self._next
        self._next += 1
        self._blocks[generation] = blocks
        self._holding[generation] = Holding.GRANTED
        return generation

    def quarantine(self, generation: int) -> None:
        """No more writes are accepted; one may be in flight."""
        if self._holding.get(generation) is not Holding.GRANTED:
            raise Internal(f"generation {generation} is not granted")
        self._holding[generation] = Holding.QUARANTINED

    def close(self, generation: int) -> None:
        """Take a generation's blocks out of the account: committed, or safe."""
        self._held.difference_update(self._blocks.pop(generation))
        del self._holding[generation]

    def count(self, holding: Holding) -> int:
        """Blocks held for one reason."""
        return sum(len(self._blocks[g]) for g, held in self._holding.items() if held is holding)

    def _refusal(self, blocks: tuple[int, ...]) -> Internal:
        for generation, own in self._blocks.items():
            for block in set(own).intersection(blocks):
                return Internal(
                    f"block {block} is {self._holding[generation]} in generation {generation} and "
                    "cannot be granted again"
                )
        return Internal("a block is named twice in one grant")
