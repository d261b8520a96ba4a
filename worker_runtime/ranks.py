"""Joins engine ranks to the data planes of kv_transfer: every rank's process runs both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from engine.config import EngineConfig
from engine.executor import Executor, build_executor, build_follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite
from kv_transfer.backends.host import process_id, worker_processes
from kv_transfer.config import TransferConfig
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.rank_commands import RankCommand, RankResult
from kv_transfer.data.threads import await_callback, enter_thread
from protocol import codec

#: Name of the call with which rank 0 sends a follower a transfer command.
TRANSFER = "transfer"
#: Name of the call that asks a follower which process it is.
PROCESS = "process"


@dataclass(slots=True, kw_only=True)
class Ranks:
    """Rank 0's executor and data plane, and the group of its followers. `run` makes it a
    RankChannel of kv_transfer."""

    executor: Executor
    plane: DataPlane
    group: RankGroup | None

    async def run(self, rank: int, command: RankCommand) -> RankResult:
        """Run one transfer command on a rank. Followers run it in order with their steps, so that a
        send after a step finds that step's KV. Raises RankLost when the rank is gone."""
        if rank == 0 or self.group is None:
            return await await_callback(partial(self.plane.submit, command))
        call = self.group.call(rank, TRANSFER, command.encode())
        return codec.decode(RankResult, (await await_callback(call.add_done_callback)).result())

    async def processes(self) -> str:
        """The processes of all ranks (kv_transfer.backends.host). Raises RankLost."""
        calls: list[Future[bytes]] = []
        if self.group is not None:
            calls = [self.group.call(rank, PROCESS, b"") for rank in range(1, self.group.size)]
        answers = [(await await_callback(call.add_done_callback)).result() for call in calls]
        return worker_processes([process_id(), *(answer.decode() for answer in answers)])

    def check(self) -> None:
        if self.group is not None:
            self.group.check()

    def close(self) -> None:
        """Close the data plane and the engine; followers end with the group."""
        self.plane.close()
        if self.group is not None:
            self.group.close()
        self.executor.close()


def load_ranks(engine: EngineConfig, transfer: TransferConfig, group: RankGroup | None) -> Executor:
    """Load rank 0, wait for the followers, run real steps. Blocks for seconds to minutes."""
    spare = engine.spare_bytes + transfer.device_memory_bytes
    executor = build_executor(replace(engine, spare_bytes=spare), group)
    executor.warmup()
    return executor


def join_ranks(executor: Executor, transfer: TransferConfig, group: RankGroup | None) -> Ranks:
    """Start the data plane of loaded ranks; its threads inherit the priority of this one."""
    enter_thread(executor.pool.device)
    return Ranks(executor=executor, plane=DataPlane(executor.pool, transfer), group=group)


def follow_rank(
    invite: RankInvite,
    rank: int,
    engine: EngineConfig,
    transfer: TransferConfig,
    *,
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """Main function of a follower process: load its share, call `loaded`, run the commands of rank
    0 until it ends. Blocking."""
    executor = build_follower(invite, rank, engine)
    plane = DataPlane(executor.pool, transfer)
    loaded()
    try:
        executor.follow({TRANSFER: plane.execute, PROCESS: lambda _: process_id().encode()})
    finally:
        plane.close()
