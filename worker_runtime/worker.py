"""What a worker of either kind is: engine ranks, step thread, control server. The two kinds add a
scheduler and one side of the hand-off; cluster.serve.worker_replica runs one in each replica."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from concurrency.tasks import Tasks
from concurrency.threads import in_own_thread
from engine.config import EngineConfig
from engine.kv.allocator import BlockAllocator
from engine.ranks.group import RankGroup
from grammar.matcher import Matcher
from kv_transfer.backends.host import process_id
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
from worker_runtime.control.control_service import ControlService, Identity, SubmitLimits
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
Side = TypeVar("Side", Sender, Receiver)
#: Threads that wait for a GPU must not wait the usual 5 ms for the interpreter's lock after it.
_SWITCH_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is built from. `secret` is the cluster's, for control calls and
    tickets."""

    worker_id: str
    engine: EngineConfig
    worker: WorkerConfig
    transfer: TransferConfig
    secret: bytes


class Worker(ABC, Generic[C, Out, Side]):
    """One replica of a pool: an engine (one or more ranks), a scheduler, one side of the hand-off.

    All methods belong to the event loop that `start` runs on. `group` holds the follower ranks when
    the engine is tensor parallel; the worker closes it. A kind of worker says what its `role` is,
    whether requests have their `whole_output` there, and what its `scheduler` and side of the
    hand-off are.
    """

    role: ClassVar[Role]
    whole_output: ClassVar[bool]
    scheduler: ClassVar[type[Scheduler[Any, Any, Any]]]

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        group: RankGroup | None = None,
    ) -> None:
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
        self.shell: ControlService
        self._handoff: Side
        self._grammars: Grammars
        self._loop: StepLoop[C, Out]

    # --- what kinds of workers differ in ---------------------------------------------------------

    @abstractmethod
    async def _open_handoff(self, party: EndpointContext) -> Side:
        """Its side of the hand-off, ready for requests."""

    @abstractmethod
    def _accept(self, submit: Submit) -> None:
        """Tell the hand-off of a request, or refuse it with a typed error."""

    @abstractmethod
    def _carry_out(self, out: Out) -> None:
        """Do what the step thread has decided about hand-offs."""

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        """These workers take requests. Nothing to be done by one that they call themselves."""

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> WorkerRef:
        """Load the model, run a real step, serve. Returns once the worker is ready for requests."""
        await self._load()
        executor = self.ranks.executor
        layout = executor.layout
        self.ref = WorkerRef(
            worker_id=self.settings.worker_id,
            epoch=new_epoch(),
            role=self.role,
            address=self._server.bind(self.settings.worker.host),
            process=process_id(),
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
            blocks=BlockAllocator(layout.num_blocks, layout.block_size),
            fingerprint=executor.fingerprint,
            place=self.settings.worker_id,
        )
        self._loop = self._make_loop(scheduler)
        self.shell = self._make_shell()
        self._server.add(self.shell.handlers())
        self._server.add(self._handoff.handlers())
        await self._server.start()
        await asyncio.to_thread(self._loop.start)
        self.shell.become(WorkerState.READY)
        return self.ref

    def peers_left(self, epochs: frozenset[int]) -> None:
        """These workers have left the cluster, or are silent: end the hand-offs with them now."""
        for epoch in epochs:
            self.tasks.start(self._handoff.peer_lost(epoch))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, finish the old; False when `timeout_s` passed first."""
        return await self.shell.drained(timeout_s)

    async def stop(self) -> None:
        """End at once: running requests fail for their routers, which resume them elsewhere."""
        self.shell.become(WorkerState.STOPPED)
        self.shell.outlet.close()
        await asyncio.to_thread(self._loop.stop)
        await self.tasks.wind_up()
        await self._handoff.close()
        await self._server.stop()
        await self._clients.close()
        self._grammars.close()
        await asyncio.to_thread(self.ranks.close)

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or hangs, RankLost when a rank is gone."""
        self.shell.check_health()
        self.ranks.check()

    def status(self) -> WorkerStatus:
        """This worker as it is now."""
        return self.shell.status()

    # --- parts ----------------------------------------------------------------------------------

    async def _load(self) -> None:
        """The model on every rank, after a real step, and what its grammars need."""
        settings = self.settings
        if _shares_cores(settings.engine):
            self._cores = SharedCores()
            self._cores.claim()
        executor = await in_own_thread(
            lambda: load_ranks(settings.engine, settings.transfer, self._group),
            steps_back=self._group is None,  # or what ranks meet through would, too
        )
        self.ranks = await in_own_thread(
            lambda: join_ranks(executor, settings.transfer, self._group), steps_back=False
        )
        self._grammars = await Grammars.load(
            Path(settings.engine.model_path),
            executor.vocab_size,
            threads=settings.worker.grammar_threads,
        )
        if self.ranks.executor.pool.marks is not None:
            sys.setswitchinterval(_SWITCH_S)

    def _make_loop(self, scheduler: Scheduler[Any, C, Out]) -> StepLoop[C, Out]:
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
        """A turn of the step thread, on the event loop. Tokens go out first."""
        self.shell.deliver(out.events, snapshot, accepted)
        self._carry_out(out)

    def _make_shell(self) -> ControlService:
        executor = self.ranks.executor

        def accept_and_queue(submit: Submit, matcher: Matcher | None) -> int:
            self._accept(submit)
            return self.inbox.put(Submitted(submit=submit, matcher=matcher))

        limits = SubmitLimits(
            vocab_size=executor.vocab_size,
            max_model_len=executor.max_model_len,
            block_size=executor.layout.block_size,
            num_blocks=executor.layout.num_blocks,
        )
        return ControlService(
            ref=self.ref,
            identity=Identity(
                limits=limits,
                layout=executor.layout,
                fingerprint=executor.fingerprint,
                whole_output=self.whole_output,
            ),
            config=self.settings.worker,
            progress=self._loop,
            clock=self.clock,
            accept=accept_and_queue,
            grammars=self._grammars,
            cancel=lambda message: self.inbox.put(RequestCancelled(keys=message.keys)),
            router_gone=self._router_gone,
            handoff_counters=self._handoff.stats.counters,
        )

    def _router_gone(self, router_id: str) -> None:
        self.inbox.put(RouterGone(router_id=router_id))


def _shares_cores(engine: EngineConfig) -> bool:
    """Ranks of one engine wait for each other, so their threads must not vary; a GPU needs none."""
    return engine.device == "cpu" and engine.tp_size == 1 and engine.num_threads is None
