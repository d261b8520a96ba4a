"""The bound on what one router has in flight, so that it refuses at once instead of drowning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import InvalidRequest, Overloaded, Unavailable


class Admission:
    """Counts sequences in flight. Refusing costs nothing: it happens before any text is touched."""

    def __init__(self, *, limit: int, retry_after_s: float) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self, sequences: int) -> Iterator[None]:
        """Count `sequences` for the length of the block.

        Raises Unavailable while draining, Overloaded when the bound would be passed, InvalidRequest
        when the bound is too small for it at any time.
        """
        if sequences > self._limit:
            raise InvalidRequest(
                f"n asks for {sequences} sequences, at most {self._limit} can run", param="n"
            )
        if self.draining:
            raise Unavailable("this router is draining", retry_after_s=self._retry_after_s)
        if self.in_flight + sequences > self._limit:
            raise Overloaded(
                f"{self.in_flight} of {self._limit} sequences are in flight",
                retry_after_s=self._retry_after_s,
            )
        self.in_flight += sequences
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= sequences
            if not self.in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()
