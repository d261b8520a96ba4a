"""An admission queue over stand-ins for workers, on a clock that tests set."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from observability import metrics
from observability.export import MetricSet
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import WorkerLoad
from router.admission.load_estimate import QueuedRequest
from router.admission.queue import AdmissionQueue, AdmissionTicket
from router.auth.keys import ANYONE, Caller, ServiceTier
from router.config import RouterConfig
from router.workers.bookkeeping import Reservations
from router.workers.worker_client import WorkerClient


class Worker:
    """Stands for a WorkerClient. Attempts are in its reservations until `report`."""

    def __init__(self, role: Role, load: WorkerLoad, free_tokens: int = 0) -> None:
        self.ref = WorkerRef(worker_id=role.value, epoch=1, role=role, address="")
        self.load = load
        self.reservations = Reservations()
        self.capacity_tokens = free_tokens

    @property
    def free_tokens(self) -> int:
        return max(0, self.capacity_tokens - self.reservations.blocks)  # blocks of one token

    def backlog_tokens(self, size: int) -> int:
        return WorkerClient.backlog_tokens(self, size)  # type: ignore[arg-type]


class Workers:
    """Stands for a WorkerSet: one prefill worker of 100 tokens a second, one decode worker."""

    def __init__(self) -> None:
        self.looks = 0
        self.on_report = lambda: None
        self.prefill = Worker(Role.PREFILL, WorkerLoad(tokens_per_second=100.0))
        self.decode = Worker(Role.DECODE, WorkerLoad(), free_tokens=1600)
        self.prefills, self.decodes = [self.prefill], [self.decode]
        self.lost = False  # decode

    def ready(self, role: Role) -> list[Worker]:
        self.looks += role is Role.DECODE
        if role is Role.PREFILL:
            return self.prefills
        return [] if self.lost else self.decodes

    def lose_decode(self, lost: bool = True) -> None:
        self.lost = lost
        self.on_report()

    def report(self, **load: Any) -> None:
        """What other routers have sent to prefill."""
        self.prefill.load = replace(self.prefill.load, **load)
        self.on_report()


class Ticket(AdmissionTicket):
    """Its request is on the workers, unreported, from its release to its first token."""

    bench: Bench
    key: RequestKey

    async def wait(self) -> None:
        await super().wait()
        request, workers = self.request, self.bench.workers
        workers.prefill.reservations.reserve(self.key, tokens=request.work, blocks=0)
        decode = max(workers.decodes, key=lambda worker: worker.free_tokens)
        decode.reservations.reserve(self.key, tokens=0, blocks=request.tokens)
        self.submitted()

    def started(self) -> None:
        for worker in (*self.bench.workers.prefills, *self.bench.workers.decodes):
            worker.reservations.release(self.key)
        super().started()

    def end(self, output_tokens: int) -> None:
        self.started()
        super().end(output_tokens)


class Bench:
    """An admission queue with a clock of its own."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.workers = Workers()
        self.metrics = MetricSet(model_name="m")
        self.num_tickets = 0
        config = RouterConfig(model_path="m", **({"dispatch_window_s": 1.0} | settings))
        self.queue = AdmissionQueue(
            workers=self.workers,  # type: ignore[arg-type]
            config=config,
            metric_set=self.metrics,
            clock=lambda: self.now,
        )

    def ticket(self, tokens: int, caller: Caller = ANYONE, **fields: Any) -> Ticket:
        tier = fields.pop("tier", ServiceTier())
        request = QueuedRequest(
            caller=caller,
            tier_name="default",
            tier=tier,
            tokens=tokens,
            largest=tokens,
            priority=fields.pop("priority", 0),
            arrival=self.now,
            deadline=self.now + fields.pop("left_s", 600.0),
            work=max(1, tokens - fields.pop("cached", 0)),
        )
        ticket = Ticket(self.queue, request)
        ticket.bench, ticket.key = self, RequestKey(f"r{self.num_tickets}")
        self.num_tickets += 1
        return ticket

    @property
    def waiting(self) -> tuple[float, float]:
        return (
            self.metrics.value(metrics.QUEUED_REQUESTS),
            self.metrics.value(metrics.QUEUED_TOKENS),
        )

    @property
    def idle(self) -> bool:
        return not any(self.queue._tickets.values()) and self.waiting == (0, 0)


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
