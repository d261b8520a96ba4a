"""A worker of the GPU chaos run in a process of its own, told what to do over a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.ranks.group import RankGroup
from kv_transfer.data.rank_commands import CloseCommand, RankCommand
from kv_transfer.data.threads import await_callback
from protocol.errors import HandoffFailed
from protocol.ids import Role, WorkerRef
from tests.support.processes import Child, obey
from worker_runtime.ranks import follow_rank
from worker_runtime.worker import Worker, WorkerSettings

PATIENCE_S = 60.0


class Host:
    """One worker with its ranks, told what to do over a pipe."""

    def __init__(self, role: Role, settings: WorkerSettings) -> None:
        self._role = role
        size = settings.engine.tp_size
        self._group = RankGroup(size) if size > 1 else None
        self._followers = [
            multiprocessing.get_context("spawn").Process(
                target=follow_rank,
                args=(
                    *(self._group.invite, rank, settings.engine),
                    *(settings.transfer, settings.tiers),
                ),
                daemon=True,
            )
            for rank in range(1, size)
            if self._group is not None
        ]
        for follower in self._followers:
            follower.start()
        self._worker = Worker(settings, group=self._group)
        self._size = size
        self._random = random.Random(settings.worker_id)

    @property
    def _end(self) -> Any:
        ends = self._worker.transfers.handoffs
        return ends.sender if self._role is Role.PREFILL else ends.receiver

    async def start(self) -> WorkerRef:
        return await self._worker.start()

    async def meet(self, peer: WorkerRef) -> None:
        """Learn of a peer, as from the cluster."""
        self._worker.peers_joined((peer,))

    async def give_up(self) -> str:
        """End a random hand-off here, as soon as one moves."""
        for _ in range(100):
            begun = {}
            for key, each in self._end._live.items():  # a sender's backend is a part of its route
                begun[key] = getattr(each, "route", each).backend
            live = [key for key, backend in begun.items() if backend]
            if live:
                await self._end.end(self._random.choice(live), False, HandoffFailed("chaos").info())
                return "gave up"
            await asyncio.sleep(0.01)
        return "nothing"

    async def snap(self, sender: int, receiver: int) -> str:
        """Break the links of a random rank between two workers."""
        close = RankCommand(
            close=CloseCommand(sender_epoch=sender, receiver_epoch=receiver, incarnation=1 << 40)
        )
        rank = self._random.randrange(self._size)
        await await_callback(partial(self._worker.ranks.submit, rank, close))
        return "snapped"

    async def lose(self, epoch: int) -> str:
        """Take a peer for lost."""
        self._worker.peers_left(frozenset({epoch}))
        return "lost its peer"

    async def figures(self) -> dict[str, Any]:
        load = self._worker.status().load
        cuda = torch.cuda.is_available()
        return {
            "left": [
                load.running,
                load.waiting,
                load.held_blocks,
                load.quarantined_blocks,
                self._end.num_live,
            ],
            "threads": threading.active_count(),
            "gpu_mib": torch.cuda.memory_allocated() >> 20 if cuda else 0,
            "stats": dict(self._end.stats.counters()),
        }

    async def stop(self) -> list[int | None]:
        await self._worker.stop()
        for follower in self._followers:
            follower.join(20)
        return [follower.exitcode for follower in self._followers]


def child(
    role: Role,
    settings: WorkerSettings,
    gpus: list[str],
    pipe: Connection,
    *,
    host: type[Host] = Host,
) -> None:
    """The life of a worker process."""
    if settings.engine.device != "cpu":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(256)] if seen is None else seen.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[int(gpu)] for gpu in gpus)
    asyncio.run(serve(host, role, settings, pipe))


async def serve(host: type[Host], role: Role, settings: WorkerSettings, pipe: Connection) -> None:
    await obey(host(role, settings), pipe)


class Process(Child):
    """The parent's handle of a worker process."""

    def __init__(
        self,
        role: Role,
        settings: WorkerSettings,
        gpus: list[str],
        main: Callable[..., None] = child,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(main, role, settings, gpus, context=context)
        self.role = role
        self.ref: WorkerRef

    async def do(self, name: str, *args: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S * 3):
            return await asyncio.wrap_future(self.start(name, *args))
