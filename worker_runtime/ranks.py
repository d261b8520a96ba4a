"""Joins a worker's engine ranks to the data planes of kv_transfer: every rank process runs both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.executor import Executor, build_executor
from engine.ranks import RankGroup
from kv_transfer.config import TransferConfig
from kv_transfer.data_plane import DataPlane

TRANSFER = "transfer"


@dataclass(slots=True, kw_only=True)
class Ranks:
    """Rank 0's executor with the data planes of all ranks. `execute` makes it a RankChannel."""

    executor: Executor
    plane: DataPlane
    group: RankGroup | None

    async def execute(self, rank: int, order: bytes) -> bytes:
        """Run one transfer order on a rank; its answer, or its typed error."""
        assert rank == 0
        return await asyncio.wrap_future(self.plane.execute(order))

    def close(self) -> None:
        """Close the data plane and the engine; followers end with the group."""
        self.plane.close()
        self.executor.close()


def build_ranks(engine: EngineConfig, transfer: TransferConfig, group: RankGroup | None) -> Ranks:
    """Load rank 0 and run one real step. Blocking: seconds to minutes."""
    executor = build_executor(engine)
    executor.warmup()
    return Ranks(executor=executor, plane=DataPlane(executor.pool, transfer), group=group)
