"""The slots of host memory: names, leases, which one goes next. Pure; not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from itertools import chain

from protocol.errors import Internal


class SlotState(Enum):
    """State of a slot."""

    FREE = "free"
    FILLING = "filling"  # a copy writes to it; not found yet
    READY = "ready"  # holds the block of its name
    DOOMED = "doomed"  # has lost its name; free once no copy reads or writes it


class HostSlots:
    """Which slot holds which block. The least recently used goes when room is needed, unless it is
    leased; those to be kept go after all others, and are at most half. A call that contradicts the
    states raises Internal."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._states = [SlotState.FREE] * num_slots
        self._names: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._usual: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._kept: OrderedDict[bytes, float] = OrderedDict()  # until when; the same order
        self._leases: dict[int, int] = {}
        self._changes: dict[bytes, bool] = {}
        self.num_evicted = 0

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_leased(self) -> int:
        """Slots that copies in flight use."""
        return len(self._leases)

    def holds(self, name: bytes) -> bool:
        """Whether a load can read it now."""
        slot = self._slots.get(name)
        return slot is not None and self._states[slot] is SlotState.READY

    def knows(self, name: bytes) -> bool:
        """Whether it is here, or on its way."""
        return name in self._slots

    def reserve(self, name: bytes, now: float = 0.0) -> int | None:
        """A leased slot to fill with the block `name`, or None when all are leased."""
        if name in self._slots:
            raise Internal("a block has one slot")
        if not self._free and not self._evict(now):
            return None
        slot = self._free.pop()
        self._states[slot] = SlotState.FILLING
        self._names[slot], self._slots[name] = name, slot
        self._usual[name] = None
        self._leases[slot] = 1
        return slot

    def lease(self, names: Iterable[bytes]) -> list[int]:
        """Slots of blocks that are here; they stay until as many `release`."""
        slots = [self._slots[name] for name in names]
        for slot in slots:
            if self._states[slot] is not SlotState.READY:
                raise Internal(f"slot {slot} is {self._states[slot].value}")
            self._leases[slot] = self._leases.get(slot, 0) + 1
        return slots

    def filled(self, slot: int, *, ok: bool) -> None:
        """The copy into a reserved slot has ended. Its lease stays; not `ok`: it loses its name."""
        if self._states[slot] is SlotState.DOOMED:
            return
        if self._states[slot] is not SlotState.FILLING:
            raise Internal(f"slot {slot} is {self._states[slot].value}")
        self._states[slot] = SlotState.READY
        if ok:
            self._changes[self._names[slot]] = True
        else:
            self._doom(slot)

    def release(self, slots: Iterable[int]) -> None:
        """A copy that used leased slots has ended."""
        for slot in slots:
            self._leases[slot] -= 1
            if not self._leases[slot]:
                del self._leases[slot]
                if self._states[slot] is SlotState.DOOMED:
                    self._set_free(slot)

    def touch(self, names: Iterable[bytes], keep_until: float = 0.0) -> None:
        """These blocks, in the order of their sequence, were used: the first goes last. They are
        kept until then, if that is later than what was asked before."""
        for name in reversed(list(names)):
            if name not in self._slots:
                continue
            until = max(keep_until, self._kept.pop(name, 0.0))
            self._usual.pop(name, None)
            if until:
                self._kept[name] = until
            else:
                self._usual[name] = None
        while len(self._kept) > self.num_slots // 2:
            self._usual[self._kept.popitem(last=False)[0]] = None

    def forget(self, names: Iterable[bytes]) -> None:
        """Blocks whose content must not be used."""
        for name in names:
            slot = self._slots.get(name)
            if slot is not None:
                self._doom(slot)
                if slot not in self._leases:
                    self._set_free(slot)

    def take_changes(self) -> dict[bytes, bool]:
        """Names that came (True) or went (False) since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def _evict(self, now: float) -> bool:
        while self._kept and next(iter(self._kept.values())) <= now:
            expired, _ = self._kept.popitem(last=False)
            self._usual[expired] = None
            self._usual.move_to_end(expired, last=False)
        order = chain(self._usual, self._kept)
        oldest = next((name for name in order if self._slots[name] not in self._leases), None)
        if oldest is None:
            return False
        slot = self._slots[oldest]
        self._doom(slot)
        self._set_free(slot)
        self.num_evicted += 1
        return True

    def _doom(self, slot: int) -> None:
        name = self._names.pop(slot)
        del self._slots[name]
        self._usual.pop(name, None)
        self._kept.pop(name, None)
        self._changes[name] = False
        self._states[slot] = SlotState.DOOMED

    def _set_free(self, slot: int) -> None:
        self._states[slot] = SlotState.FREE
        self._free.append(slot)
