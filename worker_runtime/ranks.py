"""Joins engine ranks to the data planes of kv_transfer and to the tiers of kv_tiers: every rank's
process runs all three."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from engine.config import EngineConfig
from engine.executor import Executor, build_executor, build_follower
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite
from kv_tiers.commands import Copy, CopyKind, CopyResult, joined
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import Finish, RankTiers
from kv_transfer.backends.host import process_id, worker_processes
from kv_transfer.config import TransferConfig
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.rank_commands import Finish as Moved
from kv_transfer.data.rank_commands import RankCommand, pass_on
from kv_transfer.data.threads import await_callback, enter_thread
from protocol import codec

#: Name of the call with which rank 0 sends a follower a transfer command.
TRANSFER = "transfer"
#: Name of the call that asks a follower which process it is.
PROCESS = "process"
#: Name of the call with which rank 0 sends a follower a copy between KV tiers.
TIERS = "tiers"


@dataclass(slots=True, kw_only=True)
class Ranks:
    """Rank 0's executor, data plane and tiers, and the group of its followers. `submit` makes it a
    RankChannel of kv_transfer."""

    executor: Executor
    plane: DataPlane
    tiers: RankTiers
    group: RankGroup | None

    def submit(self, rank: int, command: RankCommand, finish: Moved) -> None:
        """Give a transfer command to a rank. Followers run it in order with their steps, so that a
        send after a step finds that step's KV."""
        if rank == 0 or self.group is None:
            self.plane.submit(command, finish)
        else:
            call = self.group.call(rank, TRANSFER, command.encode())
            call.add_done_callback(partial(pass_on, rank, finish))

    async def processes(self) -> str:
        """The processes of all ranks (kv_transfer.backends.host). Raises RankLost."""
        calls: list[Future[bytes]] = []
        if self.group is not None:
            calls = [self.group.call(rank, PROCESS, b"") for rank in range(1, self.group.size)]
        answers = [(await await_callback(call.add_done_callback)).result() for call in calls]
        return worker_processes([process_id(), *(answer.decode() for answer in answers)])

    def open_tiers(self, num_slots: int, keys: Sequence[bytes], finish: Finish) -> None:
        """Take host memory for so many slots on every rank. `keys`: of each rank's files."""
        opens = [Copy(kind=CopyKind.OPEN, number=num_slots, name=key, slots=()) for key in keys]
        self._copy(opens, finish)

    def copy(self, copy: Copy, finish: Finish) -> None:
        """Run a copy between KV tiers on every rank, on followers after the steps launched before.
        `finish` is called once, in any thread, when all have ended."""
        self._copy([copy] * (1 if self.group is None else self.group.size), finish)

    def _copy(self, copies: Sequence[Copy], finish: Finish) -> None:
        results = _Results(len(copies), finish)
        self.tiers.submit(copies[0], results.add)
        for rank, copy in enumerate(copies[1:], start=1):
            assert self.group is not None
            call = self.group.call(rank, TIERS, codec.encode(copy))
            call.add_done_callback(results.add_answer)

    def check(self) -> None:
        if self.group is not None:
            self.group.check()

    def close(self) -> None:
        """Close the data plane, the tiers and the engine; followers end with the group."""
        self.plane.close()
        self.tiers.close()
        if self.group is not None:
            self.group.close()
        self.executor.close()


class _Results:
    """Waits for the results of one copy on all ranks."""

    def __init__(self, size: int, finish: Finish) -> None:
        self._size = size
        self._finish = finish
        self._lock = threading.Lock()
        self._results: list[CopyResult] = []

    def add(self, result: CopyResult) -> None:
        with self._lock:
            self._results.append(result)
            last = len(self._results) == self._size
        if last:
            self._finish(joined(self._results))

    def add_answer(self, call: Future[bytes]) -> None:
        """A follower's; a rank that is lost ends the worker soon."""
        failed = call.exception() is not None
        self.add(CopyResult(ok=False) if failed else codec.decode(CopyResult, call.result()))


def load_ranks(
    engine: EngineConfig, transfer: TransferConfig, tiers: TierConfig, group: RankGroup | None
) -> Executor:
    """Load rank 0, wait for the followers, run real steps. Blocks for seconds to minutes."""
    spare = engine.spare_bytes + transfer.device_memory_bytes + tiers.device_memory_bytes
    executor = build_executor(replace(engine, spare_bytes=spare), group)
    executor.warmup()
    return executor


def join_ranks(
    executor: Executor, transfer: TransferConfig, tiers: TierConfig, group: RankGroup | None
) -> Ranks:
    """Start the data plane of loaded ranks; its threads inherit the priority of this one."""
    enter_thread(executor.pool.device)
    return Ranks(
        executor=executor,
        plane=DataPlane(executor.pool, transfer),
        tiers=RankTiers(executor.pool, tiers),
        group=group,
    )


def follow_rank(
    invite: RankInvite,
    rank: int,
    engine: EngineConfig,
    transfer: TransferConfig,
    tiers: TierConfig,
    *,
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """Main function of a follower process: load its share, call `loaded`, run the commands of rank
    0 until it ends. Blocking."""
    executor = build_follower(invite, rank, engine)
    plane = DataPlane(executor.pool, transfer)
    held = RankTiers(executor.pool, tiers)
    loaded()
    try:
        executor.follow(
            {
                TRANSFER: plane.execute,
                PROCESS: lambda _: process_id().encode(),
                TIERS: held.execute,
            }
        )
    finally:
        plane.close()
        held.close()
