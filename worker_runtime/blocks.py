"""The part of the engine's block allocator that schedulers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Blocks(Protocol):
    """Free, held, cached and quarantined blocks always add up to all blocks."""

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        ...

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks kept for their content only."""
        ...

    @property
    def num_quarantined(self) -> int:
        """Blocks that a write may still be in flight to."""
        ...

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks, or None when there are not that many (then nothing is taken)."""
        ...

    def free(self, ids: Sequence[int]) -> None:
        """Give held blocks back."""
        ...

    def quarantine(self, ids: Sequence[int]) -> None:
        """Turn held blocks into quarantined ones."""
        ...

    def unquarantine(self, ids: Sequence[int]) -> None:
        """Turn quarantined blocks into free ones."""
        ...
