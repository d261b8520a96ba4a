"""The body of a worker: engine ranks, step thread, control server. The two workers add what
differs: a scheduler and one side of the hand-off."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from engine.config import EngineConfig
from engine.kv.allocator import BlockAllocator
from engine.ranks import RankGroup
from grammar.matcher import Matcher
from kv_transfer.config import TransferConfig
from kv_transfer.party import Party
from kv_transfer.tasks import Tasks
from protocol.ids import Role, WorkerRef, new_epoch
from protocol.messages import Cancel, Submit, WorkerStatus
from protocol.states import WorkerState
from rpc.service import ClientPool, ControlServer, Handler, Method
from worker_runtime.clock import Clock, wall_clock
from worker_runtime.commands import Cancelled, RouterCommand, RouterGone, Submitted
from worker_runtime.config import WorkerConfig
from worker_runtime.cores import SharedCores
from worker_runtime.grammars import Grammars
from worker_runtime.inbox import Inbox
from worker_runtime.limits import Limits
from worker_runtime.ranks import Ranks, build_ranks
from worker_runtime.scheduler import Output, Scheduler, Snapshot
from worker_runtime.shell import Identity, Shell
from worker_runtime.step_loop import Deliver, StepLoop
from worker_runtime.threads import in_own_thread

C = TypeVar("C")
Out = TypeVar("Out", bound=Output)
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


class WorkerHost(Generic[C, Out]):
    """Loads, serves, drains and stops one worker. All methods belong to one event loop.

    `load` first, then `serve`. `group` holds the follower ranks when the engine is tensor parallel;
    the host closes it.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        group: RankGroup | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.inbox: Inbox[C | RouterCommand] = Inbox()
        self.tasks = Tasks()
        self.clients = ClientPool(secret=settings.secret)
        self._group = group
        self._cores: SharedCores | None = None
        self._server = ControlServer(secret=settings.secret)
        self.ref: WorkerRef
        self.ranks: Ranks
        self.blocks: BlockAllocator
        self.shell: Shell
        self._grammars: Grammars
        self._loop: StepLoop[C, Out]

    async def load(self, role: Role) -> WorkerRef:
        """Load the model on every rank, run a real step, and take a control port."""
        settings = self.settings
        if _shares_cores(settings.engine):
            self._cores = SharedCores()
            self._cores.claim()
        self.ranks = await in_own_thread(
            lambda: build_ranks(settings.engine, settings.transfer, self._group)
        )
        vocab_size = self.ranks.executor.vocab_size
        self._grammars = await in_own_thread(
            lambda: Grammars.load(
                Path(settings.engine.model_path),
                vocab_size,
                threads=settings.worker.grammar_threads,
            )
        )
        layout = self.ranks.executor.layout
        if self.ranks.executor.pool.marks is not None:
            sys.setswitchinterval(_SWITCH_S)
        self.blocks = BlockAllocator(layout.num_blocks, layout.block_size)
        self.ref = WorkerRef(
            worker_id=settings.worker_id,
            epoch=new_epoch(),
            role=role,
            address=self._server.bind(settings.worker.host),
        )
        return self.ref

    @property
    def party(self) -> Party:
        """This worker as one side of its hand-offs."""
        return Party(
            ref=self.ref,
            layout=self.ranks.executor.layout,
            fingerprint=self.ranks.executor.fingerprint,
            secret=self.settings.secret,
            ranks=self.ranks,
            clients=self.clients,
            config=self.settings.transfer,
        )

    async def serve(
        self,
        scheduler: Scheduler[Any, C, Out],
        *,
        deliver: Deliver[Out],
        accept: Callable[[Submit], None],
        whole_output: bool,
        handlers: Mapping[Method[Any, Any], Handler],
        handoff_counters: Callable[[], Mapping[str, int]],
    ) -> None:
        """Start the step thread and the control server; the worker is READY when this returns."""
        loop = asyncio.get_running_loop()

        def deliver_here(out: Out, snapshot: Snapshot, accepted: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, out, snapshot, accepted)

        self._loop = StepLoop(
            name=f"{self.settings.worker_id}-steps",
            scheduler=scheduler,
            deliver=deliver_here,
            executor=self.ranks.executor,
            inbox=self.inbox,
            clock=self.clock,
            cores=self._cores,
        )
        self.shell = self._make_shell(accept, whole_output, handoff_counters)
        self._server.add(self.shell.handlers())
        self._server.add(handlers)
        await self._server.start()
        self._loop.start()
        self.shell.become(WorkerState.READY)

    def _make_shell(
        self,
        accept: Callable[[Submit], None],
        whole_output: bool,
        handoff_counters: Callable[[], Mapping[str, int]],
    ) -> Shell:
        executor = self.ranks.executor

        def accept_and_queue(submit: Submit, matcher: Matcher | None) -> None:
            accept(submit)
            self.inbox.put(Submitted(submit=submit, matcher=matcher))

        def cancel(message: Cancel) -> None:
            self.inbox.put(Cancelled(keys=message.keys))

        limits = Limits(
            vocab_size=executor.vocab_size,
            max_model_len=executor.max_model_len,
            block_size=executor.layout.block_size,
            num_blocks=executor.layout.num_blocks,
        )
        return Shell(
            ref=self.ref,
            identity=Identity(
                limits=limits,
                layout=executor.layout,
                fingerprint=executor.fingerprint,
                whole_output=whole_output,
            ),
            config=self.settings.worker,
            progress=self._loop,
            clock=self.clock,
            accept=accept_and_queue,
            grammars=self._grammars,
            cancel=cancel,
            router_gone=lambda router_id: self.inbox.put(RouterGone(router_id=router_id)),
            handoff_counters=handoff_counters,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, finish the old; False when `timeout_s` passed first."""
        return await self.shell.drained(timeout_s)

    async def stop(self, close_handoff: Callable[[], Any]) -> None:
        """End at once: running requests fail for their routers, which resume them elsewhere."""
        self.shell.become(WorkerState.STOPPED)
        self.shell.outlet.close()
        await asyncio.to_thread(self._loop.stop)
        await self.tasks.wind_up()
        await close_handoff()
        await self._server.stop()
        await self.clients.close()
        self._grammars.close()
        await asyncio.to_thread(self.ranks.close)

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or hangs, RankLost when a rank is gone."""
        self.shell.check_health()
        self.ranks.check()

    def status(self) -> WorkerStatus:
        """This worker as it is now."""
        return self.shell.status()


def _shares_cores(engine: EngineConfig) -> bool:
    """Ranks of one engine wait for each other, so their threads must not vary; a GPU needs none."""
    return engine.device == "cpu" and engine.tp_size == 1 and engine.num_threads is None
