"""The hints of a worker's cached blocks, some nine bytes each.

A pool of a million tokens has 62,500 blocks, and a router may follow thousands of workers.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from protocol.kv_layout import split_hints

#: Changes that are kept apart before they are merged, at least; a Python number has 32 bytes.
_MIN_APART = 256
#: The same, as a share of what is held: merging costs as much as copying that.
_APART_SHARE = 64

_Hints = npt.NDArray[np.uint64]
_NONE: _Hints = np.empty(0, np.uint64)
#: Hints are even: their first bits say about where they are.
_FIRST_BITS = 10
_REST_BITS = 64 - _FIRST_BITS
_BOUNDS: _Hints = np.arange(1 << _FIRST_BITS, dtype=np.uint64) << np.uint64(_REST_BITS)


class HintSet:
    """A set of 64-bit numbers: a sorted array, and the latest changes to it beside it."""

    __slots__ = ("_added", "_base", "_first", "_removed", "_sorted")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._set_base(_NONE)
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def change(self, *, added: bytes = b"", removed: bytes = b"") -> None:
        """Remove and add concatenated hints, in this order. Those that are there or missing already
        do no harm."""
        if removed:
            gone = split_hints(removed)
            self._added.difference_update(gone)
            self._removed.update(gone)
        if added:
            new = split_hints(added)
            self._removed.difference_update(new)
            self._added.update(new)
        apart = len(self._added) + len(self._removed)
        if apart > max(_MIN_APART, len(self._base) // _APART_SHARE):
            self._merge()

    def __contains__(self, hint: int) -> bool:
        if hint in self._added:
            return True
        if hint in self._removed:
            return False
        part, base = hint >> _REST_BITS, self._sorted
        at = bisect_left(base, hint, self._first[part], self._first[part + 1])
        return at < len(base) and base[at] == hint

    def without_bits(self, bits: int) -> set[int]:
        """The hints in which none of these bits is set."""
        found = set(self._base[(self._base & np.uint64(bits)) == 0].tolist())
        return {hint for hint in found | self._added if not hint & bits} - self._removed

    @property
    def num_bytes(self) -> int:
        """About what it takes, Python's own numbers and sets included."""
        apart = len(self._added) + len(self._removed)
        return self._base.nbytes + self._first.nbytes + 100 * apart

    def _merge(self) -> None:
        base = self._base
        if self._removed:
            gone = _array(self._removed)
            at = np.searchsorted(base, gone)
            there = at < len(base)
            there[there] = base[at[there]] == gone[there]
            base = np.delete(base, at[there])
        if self._added:
            new = _array(self._added)
            at = np.searchsorted(base, new)
            known = at < len(base)
            known[known] = base[at[known]] == new[known]
            base = np.insert(base, at[~known], new[~known])
        self._added, self._removed = set(), set()
        self._set_base(base)

    def _set_base(self, base: _Hints) -> None:
        self._base = base
        # Views are quicker to look at number by number.
        self._sorted = base.data
        self._first = np.append(np.searchsorted(base, _BOUNDS), len(base)).data


def _array(hints: set[int]) -> _Hints:
    found = np.fromiter(hints, np.uint64, len(hints))
    found.sort()
    return found
