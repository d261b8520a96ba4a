"""The copies of KV tiers in a simulated world: one block at a time, in any order between threads,
with failures that leave garbage behind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from kv_tiers.commands import Copy, CopyKind, CopyResult
from tests.support.paged import PagedTokens

Files = dict[bytes, list[list[int]]]
_THREADS = {CopyKind.DROP: CopyKind.WRITE}


class SimTiers:
    """One worker's threads. `files` are shared by workers with blocks of one size."""

    def __init__(
        self,
        engine: PagedTokens,
        num_slots: int,
        files: Files,
        rng: random.Random,
        done: Callable[[int, CopyResult], object],
    ) -> None:
        self._engine = engine
        self._slots = [[-7] * engine.block_size for _ in range(num_slots)]
        self._files = files
        self._random = rng
        self._done = done
        self._queues: dict[CopyKind, deque[Copy]] = {}
        self._at: dict[CopyKind, int] = {}
        self.fault_rate = 0.0
        self.ends: dict[tuple[CopyKind, bool], int] = {}

    def start(self, copy: Copy) -> None:
        kind = _THREADS.get(copy.kind, copy.kind)
        self._queues.setdefault(kind, deque()).append(copy)

    @property
    def busy(self) -> bool:
        return any(self._queues.values())

    def blocks(self) -> set[int]:
        """Blocks of the pool that running copies use."""
        return {b for queue in self._queues.values() for copy in queue for b in copy.blocks}

    def step(self) -> None:
        """One thread moves one block, or ends its copy."""
        kind = self._random.choice([kind for kind, queue in self._queues.items() if queue])
        copy, at = self._queues[kind][0], self._at.get(kind, 0)
        if self._random.random() < self.fault_rate:
            self._spoil(copy)
            self._end(kind, ok=False)
        elif copy.kind is CopyKind.READ and copy.name not in self._files:
            self._end(kind, ok=False)
        elif at < len(copy.slots):
            self._move(copy, at)
            self._at[kind] = at + 1
        else:
            if copy.kind is CopyKind.WRITE:
                self._files[copy.name] = [list(self._slots[slot]) for slot in copy.slots]
            elif copy.kind is CopyKind.DROP:
                self._files.pop(copy.name, None)
            self._end(kind, ok=True)

    def _move(self, copy: Copy, at: int) -> None:
        slot = copy.slots[at]
        match copy.kind:
            case CopyKind.STORE:
                self._slots[slot][:] = self._engine.slots[copy.blocks[at]]
            case CopyKind.LOAD:
                self._engine.slots[copy.blocks[at]][:] = self._slots[slot]
            case CopyKind.READ:
                self._slots[slot][:] = self._files[copy.name][copy.first + at]

    def _spoil(self, copy: Copy) -> None:
        """A copy that fails leaves garbage where it writes."""
        if copy.kind is CopyKind.LOAD:
            for block in copy.blocks:
                self._engine.slots[block][:] = [-8] * self._engine.block_size
        elif copy.kind in (CopyKind.STORE, CopyKind.READ):
            for slot in copy.slots:
                self._slots[slot][:] = [-9] * self._engine.block_size

    def _end(self, kind: CopyKind, *, ok: bool) -> None:
        copy = self._queues[kind].popleft()
        self._at[kind] = 0
        self.ends[copy.kind, ok] = self.ends.get((copy.kind, ok), 0) + 1
        self._done(copy.number, CopyResult(ok=ok, num_bytes=len(copy.slots), seconds=1e-6))


def reached(*worlds: Any) -> dict[tuple[CopyKind, bool], int]:
    """How many copies of each kind ended, well or not, in these worlds."""
    total: dict[tuple[CopyKind, bool], int] = {}
    for world in worlds:
        for worker in (world.prefill, world.decode):
            for key, count in worker.tiers.ends.items():
                total[key] = total.get(key, 0) + count
    return total
