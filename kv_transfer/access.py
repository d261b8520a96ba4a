"""Who may touch the pool: an access can be revoked as long as it has not begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import StrEnum


class AccessState(StrEnum):
    """Life of one access of a link's thread to the pool."""

    ALLOWED = "allowed"
    ACTIVE = "active"
    OVER = "over"


class Access:
    """Gathers out of, or scatters into, the pool's blocks for one message. Safe from any thread.

    `over` is done once this access can touch nothing any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = AccessState.ALLOWED
        self._revoked = False
        self.over: Future[None] = Future()

    @contextmanager
    def entered(self, *, last: bool = True) -> Iterator[bool]:
        """Yields whether the pool may be touched inside the block. Only after a block that is not
        the `last` may it be entered again."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave(last=last)

    def enter(self) -> bool:
        """Whether the pool may be touched from here on, until `leave`."""
        return self._step(AccessState.ALLOWED, AccessState.ACTIVE)

    def leave(self, *, last: bool = True) -> None:
        """The pool is touched no more, only for now unless this was the `last` time."""
        with self._lock:
            over = last or self._revoked
            self._state = AccessState.OVER if over else AccessState.ALLOWED
        if over:
            self.over.set_result(None)

    def revoke(self) -> Future[None]:
        """Forbid the access from now on; returns `over`, which waits for a block that was
        entered."""
        with self._lock:
            self._revoked = True
            begun = self._state is not AccessState.ALLOWED
            if not begun:
                self._state = AccessState.OVER
        if not begun:
            self.over.set_result(None)
        return self.over

    def _step(self, current: AccessState, target: AccessState) -> bool:
        with self._lock:
            if self._state is not current:
                return False
            self._state = target
            return True
