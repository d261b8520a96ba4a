"""Joins a worker's engine ranks to the data planes of kv_transfer: every rank process runs both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.executor import Executor, build_executor, build_follower
from engine.ranks import RankGroup, RankInvite, follow
from kv_transfer.data_plane import DataPlane

from kv_transfer.config import TransferConfig

TRANSFER = "transfer"


@dataclass(slots=True, kw_only=True)
class Ranks:
    """Rank 0's executor with the data planes of all ranks. `execute` makes it a RankChannel."""

    executor: Executor
    plane: DataPlane
    group: RankGroup | None

    async def execute(self, rank: int, order: bytes) -> bytes:
        """Run one transfer order on a rank; its answer, or its typed error."""
        if rank == 0 or self.group is None:
            return await asyncio.wrap_future(self.plane.execute(order))
        return await asyncio.wrap_future(self.group.call(rank, TRANSFER, order))

    def close(self) -> None:
        """Close the data plane and the engine; followers end with the group."""
        self.plane.close()
        self.executor.close()
        if self.group is not None:
            self.group.close()


def build_ranks(engine: EngineConfig, transfer: TransferConfig, group: RankGroup | None) -> Ranks:
    """Load rank 0 and run one real step. Blocking: seconds to minutes."""
    executor = build_executor(engine, group)
    executor.warmup()
    return Ranks(executor=executor, plane=DataPlane(executor.pool, transfer), group=group)


def follow_rank(
    invite: RankInvite, rank: int, engine: EngineConfig, transfer: TransferConfig
) -> None:
    """The whole life of a follower process: load its shard, obey rank 0, end with it. Blocking."""
    executor = build_follower(invite, rank, engine)
    plane = DataPlane(executor.pool, transfer)
    try:
        follow(executor, {TRANSFER: plane.execute})
    finally:
        plane.close()
