"""How much of a rank's memory the buffers of its nccl links take."""

from __future__ import annotations

import threading

#: Smaller messages are not worth sending, however many links there are.
_LEAST = 16 << 20


class Staging:
    """A budget of `total` bytes, from which each link takes `count` buffers. Safe from any thread.

    No link takes more than a quarter of what is left, so the first ones get large buffers and the
    last one still gets some.
    """

    def __init__(self, total: int, *, largest: int, count: int) -> None:
        self._left = total
        self._largest = largest
        self._count = count
        self._lock = threading.Lock()

    def take(self, least: int) -> int:
        """Bytes of each of a link's buffers: `least` or more, even if that is too much."""
        floor = max(least, min(_LEAST, self._largest))
        with self._lock:
            size = self._largest
            while size > floor and self._count * size > self._left // 4:
                size //= 2
            size = max(size, floor)
            self._left -= self._count * size
            return size

    def give(self, size: int) -> None:
        """A link's buffers became so many bytes smaller each."""
        with self._lock:
            self._left += self._count * size
