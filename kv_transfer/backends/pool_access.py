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


class PoolAccess:
    """Gathers out of, or scatters into, the pool's blocks for one message. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = AccessState.ALLOWED
        self._over: Future[None] | None = None  # once somebody has asked

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Yields whether the pool may be touched inside the block, once."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave()

    def enter(self) -> bool:
        """Whether the pool may be touched from here on, until `leave`."""
        with self._lock:
            allowed = self._state is AccessState.ALLOWED
            if allowed:
                self._state = AccessState.ACTIVE
            return allowed

    def leave(self) -> None:
        """The pool is touched no more."""
        with self._lock:
            self._state = AccessState.OVER
            over = self._over
        if over is not None:
            over.set_result(None)

    def revoke(self) -> Future[None]:
        """Forbid the access from now on. What is returned is done once it can touch nothing any
        more: one that was entered has to be left."""
        with self._lock:
            if self._state is AccessState.ALLOWED:
                self._state = AccessState.OVER
            if self._over is None:
                self._over = Future()
                if self._state is AccessState.OVER:
                    self._over.set_result(None)
            return self._over
