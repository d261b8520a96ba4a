"""What each router has yet to be told of this worker's prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from protocol.prefix import HINT_BYTES, CacheChange

#: Hints in one message: half a MiB, of the four that a message may have.
_MOST_HINTS = 1 << 16


class CacheFeed:
    """Net changes by router: what came and went between two messages is not told at all, so a
    router that does not listen costs no more than the blocks that it and this worker know. Lives on
    the event loop; knows hints only, so two digests with the same hint count as one."""

    def __init__(self) -> None:
        self._held: dict[bytes, None] = {}  # in the order they came
        self._untold: dict[str, dict[bytes, bool]] = {}
        self._new: set[str] = set()

    def change(self, changes: Mapping[bytes, bool]) -> None:
        """Digests have come (True) or gone (False)."""
        for digest, here in changes.items():
            hint = digest[:HINT_BYTES]
            if (hint in self._held) is here:
                continue
            if here:
                self._held[hint] = None
            else:
                del self._held[hint]
            for untold in self._untold.values():
                if untold.pop(hint, None) is None:  # else the router knows it as it is now
                    untold[hint] = here

    def open(self, router_id: str) -> None:
        """A router listens from now on and knows nothing."""
        self._untold[router_id] = dict.fromkeys(self._held, True)
        self._new.add(router_id)

    def close(self, router_id: str) -> None:
        """A router has left."""
        self._untold.pop(router_id, None)
        self._new.discard(router_id)

    def take(self, router_id: str) -> CacheChange | None:
        """The next part of what a router has to be told; None when that is nothing."""
        untold = self._untold.get(router_id)
        if not untold and router_id not in self._new:
            return None
        told = dict(islice((untold or {}).items(), _MOST_HINTS))
        for hint in told:
            del self._untold[router_id][hint]
        reset = router_id in self._new
        self._new.discard(router_id)
        return CacheChange(
            reset=reset,
            added=b"".join(hint for hint, here in told.items() if here),
            removed=b"".join(hint for hint, here in told.items() if not here),
        )
