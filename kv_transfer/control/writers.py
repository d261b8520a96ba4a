"""Senders that may write into our pool by themselves: when a hand-off has ended, its blocks are
safe only once the sender says that it has stopped, or is dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kv_transfer.config import ONE_SIDED
from kv_transfer.control.calls import CallResult
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.incoming import Incoming
from protocol.errors import Internal


def may_write(handoff: Incoming) -> bool:
    """Whether the sender writes by itself, or may: it has not said yet."""
    return not handoff.backend or handoff.backend in ONE_SIDED


async def writer_stopped(ask: Callable[[], Awaitable[CallResult]], party: EndpointContext) -> None:
    """Ask again and again, however long it takes: a frozen sender may still write when it thaws.

    Nobody listening at its address (rpc.service: an error that names it) for an operation's time
    counts as dead: a frozen process still listens.
    """
    absent_since: float | None = None
    while True:
        answer = await ask()
        if answer.error is None:
            return
        if answer.refused and not isinstance(answer.error, Internal):
            return  # its address belongs to another incarnation
        now = party.clock.monotonic()
        if answer.error.param != "address":
            absent_since = None
        elif absent_since is None:
            absent_since = now
        elif now - absent_since >= party.config.op_timeout_s:
            return
        await asyncio.sleep(party.config.repair_s)
