"""How rank 0 reaches the data planes of its worker's ranks."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kv_transfer.data.rank_commands import RankCommand, RankResult
from kv_transfer.plan.checksum import combine
from protocol.errors import BatonError, HandoffFailed, Internal


class RankChannel(Protocol):
    """Carries orders to ranks.

    `run` hands its order over before it first suspends, and each rank starts its orders in the
    order of these calls. It raises only when the rank cannot be reached (it is dead, or the group
    is).
    """

    async def run(self, rank: int, order: RankCommand) -> RankResult:
        """Run one order on one rank; its outcome, errors inside it."""
        ...


async def run_order(ranks: RankChannel, rank: int, order: RankCommand) -> RankResult:
    """The outcome of one order, errors inside it: never raises, except when cancelled."""
    try:
        return await ranks.run(rank, order)
    except BatonError as error:
        return RankResult(error=error.info(), answered=False)
    except Exception as error:  # noqa: BLE001 - the hand-off must end whatever the trouble
        internal = Internal(f"rank {rank}: {type(error).__name__}: {error}")
        return RankResult(error=internal.info(), answered=False)


async def run_orders(ranks: RankChannel, orders: dict[int, RankCommand]) -> list[RankResult]:
    """Run one order on each of several ranks; returns when all have ended."""
    if len(orders) == 1:  # the common case, without a task of its own
        ((rank, order),) = orders.items()
        return [await run_order(ranks, rank, order)]
    return await asyncio.gather(*(run_order(ranks, rank, order) for rank, order in orders.items()))


def first_error(outcomes: list[RankResult]) -> BatonError | None:
    """What went wrong, as a HandoffFailed, or None when nothing did."""
    for outcome in outcomes:
        if outcome.error is not None:
            return HandoffFailed(outcome.error.message, param=outcome.error.param)
    return None


def totals(outcomes: list[RankResult]) -> tuple[int, int]:
    """Bytes and checksum of a piece that all ranks have moved."""
    parts = [part for outcome in outcomes for part in outcome.parts]
    return sum(part.num_bytes for part in parts), combine([part.checksum for part in parts])
