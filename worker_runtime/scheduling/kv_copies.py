"""Copies between KV tiers that are in flight, and the blocks they lease. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import Copy, CopyKind
from worker_runtime.scheduling.sequence import KVLoad


@dataclass(frozen=True, slots=True)
class Store:
    """A block to store: its name, and the names of the segment that it completes."""

    name: bytes
    block: int
    segment: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RunningCopy:
    """A copy in flight. `at`: place of its first block in `load`. `stores`: the blocks of a store,
    or of a load for sequences that have no blocks yet."""

    copy: Copy
    stores: tuple[Store, ...] = ()
    load: KVLoad | None = None
    at: int = 0


class KVCopies:
    """Numbers copies and keeps them until they are done. A copy refers to its blocks of the pool
    itself, so that they are not reused meanwhile."""

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._new: list[Copy] = []
        self._number = 0
        self.running: dict[int, RunningCopy] = {}
        self.leases: Counter[int] = Counter()  # references of copies to blocks

    def start(
        self,
        kind: CopyKind,
        *,
        slots: Iterable[int],
        blocks: Iterable[int] = (),
        file: tuple[bytes, int] = (b"", 0),
        stores: tuple[Store, ...] = (),
        part: tuple[KVLoad | None, int] = (None, 0),
    ) -> Copy:
        """`file`: name and first block. `part`: of a load, from this place on."""
        self._number += 1
        copy = Copy(
            number=self._number,
            kind=kind,
            blocks=tuple(blocks),
            name=file[0],
            first=file[1],
            slots=tuple(slots),
        )
        self._blocks.retain(copy.blocks)
        self.leases.update(copy.blocks)
        self.running[copy.number] = RunningCopy(copy, stores, *part)
        self._new.append(copy)
        return copy

    def release(self, copy: Copy) -> None:
        """A copy that is done no longer uses its blocks."""
        self._blocks.free(copy.blocks)
        for block in copy.blocks:
            self.leases[block] -= 1
            if not self.leases[block]:
                del self.leases[block]

    def take_new(self) -> list[Copy]:
        """Those started since the last call."""
        new, self._new = self._new, []
        return new

    def coming(self, names: Sequence[bytes]) -> int | None:
        """The load for sequences without blocks that brings the first of `names`."""
        loads = (run for run in self.running.values() if run.copy.kind is CopyKind.LOAD)
        numbers = (
            run.copy.number
            for run in loads
            if any(store.name == name for store in run.stores for name in names[:1])
        )
        return next(numbers, None)

    def of(self, load: KVLoad, kind: CopyKind) -> list[RunningCopy]:
        """Those of one kind that work for a load."""
        runs = self.running.values()
        return [run for run in runs if run.load is load and run.copy.kind is kind]

    @property
    def num_leased_alone(self) -> int:
        """Blocks that only copies refer to: they are free, or cached, within moments."""
        return sum(self._blocks.num_references(b) == n for b, n in self.leases.items())
