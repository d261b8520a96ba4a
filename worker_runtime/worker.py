"""A worker of either kind: engine ranks, step thread, control server.

The two kinds add a scheduler and their end of the hand-off; cluster.serve.worker_replica runs one
in each replica.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from concurrency.event_loop import Tasks
from concurrency.threads import run_in_thread
from engine.config import EngineConfig
from engine.kv.allocator import BlockAllocator
from engine.ranks.group import RankGroup
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import Clock, EndpointContext
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from observability.clock import steady_clock
from protocol.ids import Role, WorkerRef, new_epoch
from protocol.messages import Submit, WorkerStatus
from protocol.states import WorkerState
from rpc.client import ClientPool
from rpc.server import ControlServer
from worker_runtime.config import WorkerConfig
from worker_runtime.control.control_service import ControlService, WorkerLimits
from worker_runtime.control.grammars import Grammars
from worker_runtime.cores import SharedCores
from worker_runtime.ranks import Ranks, join_ranks, load_ranks
from worker_runtime.scheduling.messages import (
    RequestCancelled,
    RouterCommand,
    RouterGone,
    Snapshot,
    StepOutput,
    Submitted,
)
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.step_loop import Inbox, StepLoop

C = TypeVar("C")
Out = TypeVar("Out", bound=StepOutput)
Endpoint = TypeVar("Endpoint", Sender, Receiver)
#: A thread that waited for a GPU must not wait the usual 5 ms for the interpreter lock.
_SWITCH_INTERVAL_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is built from. `secret` signs the cluster's control calls and tickets."""

    worker_id: str
    engine: EngineConfig
    worker: WorkerConfig
    transfer: TransferConfig
    secret: bytes


class Worker(ABC, Generic[C, Out, Endpoint]):
    """One replica of a pool: an engine (one or more ranks), a scheduler, an end of the hand-off.

    All methods belong to the event loop that `start` runs on. `group` holds the follower ranks of a
    tensor-parallel engine; the worker closes it. A subclass names its `role`, its `scheduler`,
    whether requests generate their `whole_output` there, and its end of the hand-off.
    """

    role: ClassVar[Role]
    whole_output: ClassVar[bool]
    scheduler: ClassVar[type[Scheduler[Any, Any, Any]]]

    def __init__(self, settings: WorkerSettings, *, group: RankGroup | None = None) -> None:
        self.settings = settings
        self.clock = steady_clock()
        self.inbox: Inbox[C | RouterCommand] = Inbox()
        self.tasks = Tasks()
        self._clients = ClientPool(secret=settings.secret)
        self._group = group
        self._cores: SharedCores | None = None
        self._server = ControlServer(secret=settings.secret)
        self.ref: WorkerRef
        self.ranks: Ranks
        self.control: ControlService
        self._handoff: Endpoint
        self._grammars: Grammars
        self._loop: StepLoop[C, Out]

    # --- what the two kinds differ in -----------------------------------------------------------

    @abstractmethod
    async def _open_handoff(self, context: EndpointContext) -> Endpoint:
        """Start its end of the hand-off."""

    @abstractmethod
    def _accept(self, submit: Submit) -> None:
        """Announce a request to the hand-off, or refuse it with a typed error."""

    @abstractmethod
    def _carry_out(self, out: Out) -> None:
        """Carry out the scheduler's decisions about hand-offs."""

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        """These workers take requests now; the end that connects to them prepares links."""

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> WorkerRef:
        """Load the model, run a real step, serve. Returns once the worker takes requests."""
        await self._load()
        executor = self.ranks.executor
        layout = executor.layout
        self.ref = WorkerRef(
            worker_id=self.settings.worker_id,
            epoch=new_epoch(),
            role=self.role,
            address=self._server.bind(self.settings.worker.host),
            process=await self.ranks.processes(),
        )
        self._handoff = await self._open_handoff(
            EndpointContext(
                ref=self.ref,
                layout=layout,
                fingerprint=executor.fingerprint,
                secret=self.settings.secret,
                ranks=self.ranks,
                clients=self._clients,
                config=self.settings.transfer,
                clock=Clock(wall=self.clock),
            )
        )
        scheduler = self.scheduler(
            config=self.settings.worker,
            blocks=BlockAllocator(layout.num_blocks, layout.block_size, layout.groups),
            fingerprint=executor.fingerprint,
            place=self.settings.worker_id,
        )
        self._loop = self._new_step_loop(scheduler)
        self.control = self._new_control(scheduler.max_chunk)
        self._server.add(self.control.handlers())
        self._server.add(self._handoff.handlers())
        await self._server.start()
        await asyncio.to_thread(self._loop.start)
        self.control.become(WorkerState.READY)
        return self.ref

    def peers_left(self, epochs: frozenset[int]) -> None:
        """These workers left the cluster or expired: end the hand-offs with them now."""
        for epoch in epochs:
            self.tasks.start(self._handoff.peer_lost(epoch))

    async def drain(self, timeout_s: float) -> bool:
        return await self.control.drained(timeout_s)

    async def stop(self) -> None:
        """End at once: running requests fail, and their routers resume them elsewhere."""
        self.control.become(WorkerState.STOPPED)
        self.control.close()
        await asyncio.to_thread(self._loop.stop)
        await self.tasks.shutdown()
        await self._handoff.close()
        await self._server.stop()
        await self._clients.close()
        self._grammars.close()
        await asyncio.to_thread(self.ranks.close)

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or hangs, RankLost when a rank is gone."""
        self.control.check_health()
        self.ranks.check()

    def status(self) -> WorkerStatus:
        return self.control.status()

    # --- parts ----------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Load the model on every rank, run real steps, load the vocabulary of grammars."""
        settings = self.settings
        if _shares_cores(settings.engine):
            self._cores = SharedCores()
            self._cores.claim()
        executor = await run_in_thread(
            lambda: load_ranks(settings.engine, settings.transfer, self._group),
            low_priority=self._group is None,  # threads that ranks meet through would inherit it
        )
        self.ranks = await run_in_thread(
            lambda: join_ranks(executor, settings.transfer, self._group), low_priority=False
        )
        self._grammars = await Grammars.load(
            Path(settings.engine.model_path),
            executor.vocab_size,
            threads=settings.worker.grammar_threads,
        )
        if executor.pool.step_events is not None:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def _new_step_loop(self, scheduler: Scheduler[Any, C, Out]) -> StepLoop[C, Out]:
        loop = asyncio.get_running_loop()

        def deliver(out: Out, snapshot: Snapshot, accepted: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, out, snapshot, accepted)

        return StepLoop(
            name=f"{self.settings.worker_id}-steps",
            scheduler=scheduler,
            deliver=deliver,
            executor=self.ranks.executor,
            inbox=self.inbox,
            clock=self.clock,
            cores=self._cores,
        )

    def _deliver(self, out: Out, snapshot: Snapshot, accepted: int) -> None:
        """Take an iteration of the step loop, on the event loop. Tokens go out first."""
        self.control.deliver(out.events, snapshot, accepted)
        self._carry_out(out)

    def _new_control(self, max_chunk: int) -> ControlService:
        executor = self.ranks.executor
        layout = executor.layout
        limit = executor.max_model_len
        return ControlService(
            ref=self.ref,
            limits=WorkerLimits(
                layout=layout,
                vocab_size=executor.vocab_size,
                max_model_len=limit,
                whole_output=self.whole_output,
                capacity=layout.tokens_in(layout.num_blocks, chunk=max_chunk, limit=limit),
            ),
            fingerprint=executor.fingerprint,
            config=self.settings.worker,
            progress=self._loop,
            clock=self.clock,
            accept=self._queue,
            grammars=self._grammars,
            cancel=lambda message: self.inbox.put(RequestCancelled(keys=message.keys)),
            router_gone=lambda router_id: self.inbox.put(RouterGone(router_id=router_id)),
            handoff_counters=self._handoff.stats.counters,
        )

    def _queue(self, command: Submitted) -> int:
        self._accept(command.submit)
        return self.inbox.put(command)


def _shares_cores(engine: EngineConfig) -> bool:
    """Ranks of one engine wait for each other, so their threads must not vary; a GPU needs none."""
    return engine.device == "cpu" and engine.tp_size == 1 and engine.num_threads is None
