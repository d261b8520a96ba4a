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
    """One gather out of, or one scatter into, the pool's blocks. Safe from any thread.

    `over` is done once this access can touch nothing any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = AccessState.ALLOWED
        self.over: Future[None] = Future()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Yields whether the pool may be touched inside the block."""
        allowed = self._step(AccessState.ALLOWED, AccessState.ACTIVE)
        try:
            yield allowed
        finally:
            if allowed and self._step(AccessState.ACTIVE, AccessState.OVER):
                self.over.set_result(None)

    def revoke(self) -> Future[None]:
        """Forbid the access if it has not begun; returns `over`."""
        if self._step(AccessState.ALLOWED, AccessState.OVER):
            self.over.set_result(None)
        return self.over

    def _step(self, current: AccessState, target: AccessState) -> bool:
        with self._lock:
            if self._state is not current:
                return False
            self._state = target
            return True
