"""Allocators for tests: every misuse of a block raises at once."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import StepBatch
from engine.kv.allocator import BlockAllocator
from protocol.kv_layout import KVFingerprint

FINGERPRINT = KVFingerprint(
    model="paged",
    weights="0",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="float32",
    rope="none",
)


class WatchedBlocks(BlockAllocator):
    """The real one, with a view of what is held."""

    @property
    def held(self) -> frozenset[int]:
        return frozenset(block for block in range(self.num_blocks) if self.num_references(block))

    def check_writes(self, batch: StepBatch) -> None:
        """A step writes only to blocks that one sequence has for itself."""
        for step in batch.sequences:
            end = self.blocks_for(step.start + len(step.tokens))
            for group, table in zip(self.groups, step.block_tables, strict=True):
                skipped = group.first_token(step.start) // self.block_size
                for block in table[step.start // self.block_size - skipped : end - skipped]:
                    assert self.num_references(block) == 1
                    assert block not in self._names


class StrictBlocks:
    """Free, held and quarantined blocks; the last freed go out first, so reuse is quick."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        self._held.update(taken)
        return taken

    def free(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._held.remove(block)
            self._free.append(block)

    def quarantine(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._held.remove(block)
            self._quarantined.add(block)

    def unquarantine(self, ids: Sequence[int]) -> None:
        for block in ids:
            self._quarantined.remove(block)
            self._free.append(block)

    def check(self) -> None:
        total = len(self._free) + len(self._held) + len(self._quarantined)
        assert total == self.num_blocks
        assert len(set(self._free)) == len(self._free)
