"""Senders that may write into our pool by themselves: when a hand-off has ended, its blocks are
safe only once the sender says that it has stopped, or is dead."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kv_transfer.calls import Answer
from kv_transfer.clock import Clock
from kv_transfer.config import ONE_SIDED, TransferConfig
from kv_transfer.incoming import Incoming
from protocol.errors import Internal, Unavailable


def may_write(handoff: Incoming) -> bool:
    """Whether the sender writes by itself, or may: it has not said yet."""
    return not handoff.backend or handoff.backend in ONE_SIDED


class Writers:
    """Waits for senders to stop. Belongs to one event loop."""

    def __init__(self, config: TransferConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._dead: dict[int, asyncio.Event] = {}
        self._waiting: Counter[int] = Counter()

    def lost(self, epoch: int) -> None:
        """The sender of this epoch is known dead."""
        if epoch in self._dead:
            self._dead[epoch].set()

    async def stopped(self, epoch: int, ask: Callable[[], Awaitable[Answer]]) -> None:
        """Ask again and again, however long it takes: a frozen sender may still write when it
        thaws.

        Nobody listening at its address for an operation's time counts as dead: a frozen process
        still listens.
        """
        dead = self._dead.setdefault(epoch, asyncio.Event())
        self._waiting[epoch] += 1
        try:
            await self._ask(dead, ask)
        finally:
            self._waiting[epoch] -= 1
            if not self._waiting[epoch]:
                del self._waiting[epoch], self._dead[epoch]

    async def _ask(self, dead: asyncio.Event, ask: Callable[[], Awaitable[Answer]]) -> None:
        absent_since: float | None = None
        while not dead.is_set():
            answer = await ask()
            if answer.error is None:
                return
            if answer.refused and not isinstance(answer.error, Internal):
                return  # its address belongs to another incarnation
            now = self._clock.monotonic()
            if not isinstance(answer.error, Unavailable):
                absent_since = None
            elif absent_since is None:
                absent_since = now
            elif now - absent_since >= self._config.op_timeout_s:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.repair_s):
                    await dead.wait()
