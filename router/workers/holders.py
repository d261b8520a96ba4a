"""Which workers have the beginning of a prompt, without a look at every worker.

Of the blocks, by their hints, one in 32 is a mark; the index knows the workers of each mark. What a
conversation has in some worker has a mark every 32 blocks on average. What many workers have is
found in a random sample of them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

#: A mark has none of them.
MARK_BITS = 0b11111
#: Workers remembered of a mark; one more replaces the oldest.
_MAX_OWNERS = 32

T = TypeVar("T")


def marks(hints: Iterable[int]) -> list[int]:
    """Those of the hints that are marks, in their order."""
    return [hint for hint in hints if not hint & MARK_BITS]


class Holders(Generic[T]):
    """The owners of each mark."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[T, ...]] = {}

    def note(self, owner: T, mark: int, here: bool) -> None:
        """An owner has a marked block now, or not any more. Idempotent."""
        others = tuple(known for known in self._owners.get(mark, ()) if known is not owner)
        if here:
            self._owners[mark] = (*others[-_MAX_OWNERS + 1 :], owner)
        elif others:
            self._owners[mark] = others
        else:
            self._owners.pop(mark, None)

    def find(self, marks_: Iterable[int]) -> Iterator[tuple[T, ...]]:
        """The owners of each mark that has any."""
        return (owners for mark in marks_ if (owners := self._owners.get(mark)))

    def __len__(self) -> int:
        return len(self._owners)
