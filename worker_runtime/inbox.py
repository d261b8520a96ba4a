"""The one way into a step thread: a queue of commands it drains between steps."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

C = TypeVar("C")


class Inbox(Generic[C]):
    """Many producers, one consumer. Waiting costs nothing and ends at once when a command
    arrives."""

    def __init__(self) -> None:
        self._items: deque[C] = deque()
        self._ready = threading.Condition()
        self._closed = False

    def put(self, command: C) -> None:
        """Add a command; callable from any thread."""
        with self._ready:
            self._items.append(command)
            self._ready.notify()

    def close(self) -> None:
        """Wake the consumer for good."""
        with self._ready:
            self._closed = True
            self._ready.notify()

    @property
    def closed(self) -> bool:
        """Whether the consumer should end."""
        return self._closed

    def drain(self) -> list[C]:
        """Everything that has arrived, without waiting."""
        with self._ready:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self, timeout_s: float | None) -> None:
        """Return when a command is there, the inbox is closed, or the time is over."""
        with self._ready:
            if not self._items and not self._closed:
                self._ready.wait(
                    None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
                )
