"""A process with a prefill worker and a tensor-parallel decode worker, which receives KV from other
processes. Controlled over a pipe, also to break its own links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import RankLost
from engine.ranks.group import RankGroup
from engine.ranks.messages import RankInvite
from kv_tiers.config import TierConfig
from kv_transfer.config import TransferConfig
from kv_transfer.data.rank_commands import CloseCommand, RankCommand
from kv_transfer.data.threads import await_callback
from protocol.errors import HandoffFailed
from protocol.ids import Role, WorkerRef
from tests.support.pair import SCHEDULERS, unsettled
from tests.support.processes import obey, open_sockets
from worker_runtime.config import WorkerConfig
from worker_runtime.ranks import follow_rank
from worker_runtime.worker import Worker, WorkerSettings

SECRET = b"a secret of the tests"
CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=64, hold_first_s=0.2)
TRANSFER = TransferConfig(
    op_timeout_s=2.0,
    connect_timeout_s=2.0,
    rpc_timeout_s=1.0,
    repair_s=1.0,
    max_piece_bytes=1 << 14,
)
BLOCK_SIZES = 32, 16  # of prefill and of decode
DECODE_RANKS = 2
DISK_BYTES = 1 << 21
_EVERY_LINK = 1 << 62
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of a process."""

    threads: int
    sockets: int
    resident_mib: float


def kv_folder(model: str) -> str:
    """The folder of KV files that all workers share."""
    return f"{model}-kv"


def settings(name: str, model: str, num_blocks: int, tp_size: int) -> WorkerSettings:
    size = BLOCK_SIZES[tp_size > 1]
    return WorkerSettings(
        worker_id=name,
        role=Role.DECODE if tp_size > 1 else Role.PREFILL,
        schedulers=SCHEDULERS,
        engine=EngineConfig(
            model_path=model,
            dtype="float32",
            block_size=size,
            num_blocks=num_blocks // size,
            tp_size=tp_size,
            num_threads=1,
        ),
        worker=CONFIG,
        transfer=TRANSFER,
        tiers=TierConfig(
            host_bytes=1 << 18, disk_path=kv_folder(model), disk_bytes=DISK_BYTES, segment_tokens=32
        ),
        secret=SECRET,
    )


def decode_settings(number: int, model: str) -> WorkerSettings:
    """Blocks for a few sequences only, so that some are preempted."""
    return settings(f"decode-{number}", model, 1024, DECODE_RANKS)


class Host:
    """The two workers."""

    def __init__(self, number: int, model: str, group: RankGroup) -> None:
        self._random = random.Random(os.getpid())
        self.prefill = Worker(settings(f"prefill-{number}", model, 2048, 1))
        self.decode = Worker(decode_settings(number, model), group=group)
        self._workers = self.prefill, self.decode
        self._ends: list[tuple[Worker, Any]] = []

    async def start(self) -> tuple[WorkerRef, WorkerRef]:
        refs = await self.prefill.start(), await self.decode.start()
        self._ends = [  # of hand-offs; of loans, either end of either worker
            (worker, end)
            for worker in self._workers
            for end in (worker.transfers.handoffs.sender, worker.transfers.handoffs.receiver)
        ]
        return refs

    async def cut(self) -> bool:
        """Close all links between one of the workers and a peer, with what moves on them."""
        worker, end = self._random.choice(self._ends)
        peers = {handoff.peer.epoch for handoff in end._live.values()}
        if not peers:
            return False
        peer, me = self._random.choice(sorted(peers)), worker.ref.epoch
        epochs = (me, peer) if end is worker.transfers.handoffs.sender else (peer, me)
        close = CloseCommand(
            sender_epoch=epochs[0], receiver_epoch=epochs[1], incarnation=_EVERY_LINK
        )
        rank = self._random.randrange(worker.ranks.executor.layout.tp_size)
        command = RankCommand(close=close)
        await await_callback(partial(worker.ranks.submit, rank, command))
        return True

    async def give_up(self) -> bool:
        """Fail a running hand-off of one of the workers."""
        _, end = self._random.choice(self._ends)
        if not end._live:
            return False
        key = self._random.choice(sorted(end._live, key=str))
        await end.end(key, False, HandoffFailed("aborted by the test").info())
        return True

    async def peers_left(self, epochs: frozenset[int]) -> None:
        self.prefill.peers_left(epochs)
        self.decode.peers_left(epochs)

    async def health(self) -> None:
        """Raises when an engine is broken."""
        self.prefill.check_health()
        self.decode.check_health()

    async def loads(self) -> list[Any]:
        return [worker.status() for worker in self._workers]

    async def unsettled(self) -> list[str]:
        return [problem for worker in self._workers if (problem := unsettled(worker))]

    async def usage(self) -> Usage:
        return _usage()


def _usage() -> Usage:
    resident = _STATUS.read_text().partition("VmRSS:")[2].split()[0]
    return Usage(
        threads=threading.active_count(),
        sockets=open_sockets(),
        resident_mib=int(resident) / 1024,
    )


def host_process(number: int, model: str, pipe: Connection) -> None:
    """Run the process: send the rank invite, then the refs once ready, then serve commands."""
    torch.set_num_threads(1)
    logging.getLogger("baton").setLevel(logging.CRITICAL)
    group = RankGroup(DECODE_RANKS)
    pipe.send(("invite", group.invite))
    asyncio.run(_serve(Host(number, model, group), pipe))


async def _serve(host: Host, pipe: Connection) -> None:
    pipe.send(("ready", await host.start()))
    await obey(host, pipe)


def follower_process(number: int, model: str, invite: RankInvite, _: Connection) -> None:
    """Rank 1 of a decode worker."""
    logging.getLogger("baton").setLevel(logging.CRITICAL)
    own = decode_settings(number, model)
    with contextlib.suppress(RankLost):  # that is how it ends
        follow_rank(invite, 1, own.engine, own.transfer, own.tiers)
