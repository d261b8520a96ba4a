"""Senders and receivers in separate processes, controlled over a pipe: for kills and freezes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from kv_transfer.plan.states import GrantState
from protocol.ids import RequestKey, Role, WorkerRef, new_epoch
from protocol.messages import Ticket
from rpc.client import ClientPool
from rpc.server import ControlServer
from tests.support.held import Held
from tests.support.processes import Child, obey, open_sockets
from tests.support.transfer import (
    SECRET,
    LocalRanks,
    ToyWorker,
    differing,
    fill,
    make_fingerprint,
    make_layout,
    make_toy_worker,
    random_kv,
)

#: Nothing is given up because the machine is busy.
PATIENT = TransferConfig(
    lease_s=600,
    op_timeout_s=60.0,
    connect_timeout_s=60.0,
    rpc_timeout_s=30.0,
    rpc_attempts=2,
    repair_s=0.5,
)
#: Silence shows in seconds.
HASTY = replace(PATIENT, op_timeout_s=2.0, connect_timeout_s=2.0, rpc_timeout_s=1.0)
ANSWER_S = 90.0


class _Host:
    """What runs in the child: any number of workers of one role, each with its own server."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._workers: list[ToyWorker] = []
        self._ends: list[Any] = []
        self._held: dict[int, Held] = {}
        self._clients = ClientPool(secret=SECRET)

    async def make(
        self, tp_size: int, shape: dict[str, Any], config: TransferConfig
    ) -> tuple[int, WorkerRef]:
        layout = make_layout(tp_size, **shape)
        server = ControlServer(secret=SECRET)
        address = server.bind()
        backends = partial(TcpBackend, "127.0.0.1")
        worker = make_toy_worker(self._role, layout, config, backends, new_epoch())
        worker.ref = WorkerRef(
            worker_id=worker.ref.worker_id, epoch=worker.ref.epoch, role=self._role, address=address
        )
        context = EndpointContext(
            ref=worker.ref,
            layout=layout,
            fingerprint=make_fingerprint(layout),
            secret=SECRET,
            ranks=LocalRanks(worker.planes),
            clients=self._clients,
            config=config,
        )
        if self._role is Role.PREFILL:
            end: Any = Sender(context, worker.events)
        else:
            end = Receiver(context, worker.events)
            await end.start()
        server.add(end.handlers())
        self._ends.append(end)
        await server.start()
        self._workers.append(worker)
        return len(self._workers) - 1, worker.ref

    async def submit(self, which: int, key: RequestKey, ticket: Ticket, peer: WorkerRef) -> None:
        end = self._ends[which]
        (end.expect if self._role is Role.PREFILL else end.offer)(key, ticket, peer)

    async def reserve(self, which: int, key: RequestKey, blocks: tuple[int, ...]) -> None:
        await self._ends[which].reserve(key, (blocks,), 0)

    async def send(
        self, which: int, key: RequestKey, blocks: tuple[int, ...], seed: int, chunk: int
    ) -> None:
        worker = self._workers[which]
        await worker.events.wait(lambda e: key in e.grants)
        fill(worker.pools, worker.layout, blocks, random_kv(worker.layout, len(blocks), seed))
        for first in range(0, len(blocks), chunk):
            part = blocks[first : first + chunk]
            self._ends[which].push(key, part, first)
        self._ends[which].commit(key, (5,))

    async def hold(self, which: int) -> None:
        """Gathers wait: a transfer can be caught in the middle."""
        held = self._held[which] = Held()
        for pool in self._workers[which].pools:
            pool.before_gather = held

    async def caught(self, which: int) -> bool:
        """Wait until a gather waits."""
        return await asyncio.to_thread(self._held[which].begun)

    async def release(self, which: int) -> None:
        """Gathers go on, and wait no more."""
        for pool in self._workers[which].pools:
            pool.before_gather = lambda: None
        self._held[which].release()

    async def over(self, which: int, key: RequestKey) -> tuple[str, Any]:
        """How a hand-off ended; waits for it."""
        events = self._workers[which].events
        await events.wait(lambda e: e.is_over(key), ANSWER_S)
        if key in dict(events.commits):
            return "committed", None
        return "ended", dict(events.ends)[key]

    async def safe(self, which: int, key: RequestKey) -> tuple[int, ...]:
        events = self._workers[which].events
        await events.wait(lambda e: key in dict(e.safe), ANSWER_S)
        return dict(events.safe)[key]

    async def wrong(self, which: int, blocks: tuple[int, ...], seed: int) -> list[Any]:
        worker = self._workers[which]
        kv = random_kv(worker.layout, len(blocks), seed)
        return differing(worker.pools, worker.layout, blocks, kv)

    async def left(self, which: int) -> tuple[int, int]:
        """Live hand-offs and blocks in the account."""
        end = self._ends[which]
        if self._role is Role.PREFILL:
            return end.num_live, 0
        return end.num_live, sum(end.num_blocks(state) for state in GrantState)

    async def sockets(self) -> int:
        return open_sockets()

    async def threads(self) -> int:
        return threading.active_count()


def _child(role: Role, pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(obey(_Host(role), pipe))


class Process(Child):
    """The parent's handle of one child."""

    def __init__(self, role: Role) -> None:
        super().__init__(_child, role)
