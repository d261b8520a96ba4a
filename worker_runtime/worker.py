"""A worker: engine ranks, step thread, control server, both ends of hand-offs.

cluster.serve.worker_replica runs one in each replica.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from concurrency.event_loop import Tasks
from concurrency.threads import run_in_thread
from engine.config import EngineConfig
from engine.kv.allocator import BlockAllocator
from engine.ranks.group import RankGroup
from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import files_key, num_host_slots, segment_blocks, slot_bytes
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import Clock, EndpointContext
from kv_transfer.data.threads import await_callback
from observability.clock import steady_clock
from observability.logging import get_logger
from protocol.ids import Role, WorkerRef, new_epoch
from protocol.messages import WorkerStatus
from protocol.states import WorkerState
from rpc.client import ClientPool
from rpc.server import ControlServer
from worker_runtime.config import WorkerConfig
from worker_runtime.control.control_service import ControlService, WorkerLimits
from worker_runtime.control.grammars import Grammars
from worker_runtime.control.transfers import Transfers
from worker_runtime.cores import SharedCores
from worker_runtime.ranks import Ranks, join_ranks, load_ranks
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    Command,
    CopyDone,
    FilesListed,
    RequestCancelled,
    RoleChanged,
    RouterGone,
    Snapshot,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache
from worker_runtime.scheduling.scheduler import Scheduler
from worker_runtime.step_loop import Inbox, StepLoop

log = get_logger(__name__)

#: A thread that waited for a GPU must not wait the usual 5 ms for the interpreter lock.
_SWITCH_INTERVAL_S = 50e-6
#: Interval at which files of other workers are looked for.
_LIST_FILES_S = 1.0
#: The disk is measured every so many times.
_LISTS_PER_PROBE = 60
#: Bytes per second that loans are taken to have before one was measured: on CPUs, on GPUs.
_LOANS = (1e9, 20e9)
#: How long a start waits for a disk.
_FIRST_LIST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is built from.

    role: the first one. schedulers: of each role. worker: the settings of the first role, `other`
    of the other (None: the same). secret: signs the cluster's control calls and tickets.
    """

    worker_id: str
    role: Role
    schedulers: Mapping[Role, type[Scheduler[Any]]]
    engine: EngineConfig
    worker: WorkerConfig
    other: WorkerConfig | None = None
    transfer: TransferConfig
    tiers: TierConfig = field(default_factory=TierConfig)
    secret: bytes

    def config(self, role: Role, step_rows: Sequence[int]) -> WorkerConfig:
        """The settings of its scheduler for a role, on an engine whose graphs for steps with prompt
        tokens have so many rows. Prefill steps outlast their launches."""
        config = self.worker if role is self.role or self.other is None else self.other
        return config.held_in_graphs(max(step_rows, default=0)) if role is Role.DECODE else config


class Worker:
    """One replica of a pool: an engine (one or more ranks), a scheduler for each role, both ends of
    hand-offs.

    All methods belong to the event loop that `start` runs on. `group` holds the follower ranks of a
    tensor-parallel engine; the worker closes it.
    """

    def __init__(self, settings: WorkerSettings, *, group: RankGroup | None = None) -> None:
        self.settings = settings
        self.clock = steady_clock()
        self.inbox: Inbox[Command] = Inbox()
        self.tasks = Tasks()
        self._clients = ClientPool(secret=settings.secret)
        self._group = group
        self._peers: tuple[WorkerRef, ...] = ()
        self._cores: SharedCores | None = None
        self._files: frozenset[bytes] = frozenset()  # segments on disk, as last listed
        self._server = ControlServer(secret=settings.secret)
        self.ref: WorkerRef
        self.ranks: Ranks
        self.control: ControlService
        self.transfers: Transfers
        self._grammars: Grammars
        self._loop: StepLoop

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> WorkerRef:
        """Load the model, run a real step, serve. Returns once the worker takes requests."""
        await self._load()
        executor = self.ranks.executor
        self.ref = WorkerRef(
            worker_id=self.settings.worker_id,
            epoch=new_epoch(),
            role=self.settings.role,
            address=self._server.bind(self.settings.worker.host, self.settings.worker.ports),
            process=await self.ranks.processes(),
        )
        self.transfers = Transfers(
            EndpointContext(
                ref=self.ref,
                layout=executor.layout,
                fingerprint=executor.fingerprint,
                secret=self.settings.secret,
                ranks=self.ranks,
                clients=self._clients,
                config=self.settings.transfer,
                clock=Clock(wall=self.clock),
            ),
            self.inbox,
            self.tasks,
            vocab_size=executor.vocab_size,
            clock=self.clock,
        )
        await self.transfers.handoffs.start()
        blocks = self._new_blocks()
        tiers = await self._open_tiers(blocks)
        peers = self._new_peers(blocks, tiers)
        schedulers = self._new_schedulers(blocks, tiers, peers)
        both = BothRoles(schedulers, blocks, self.settings.role, tiers, peers)
        self._loop = self._new_step_loop(both)
        self.control = self._new_control(schedulers)
        self._server.add(self.control.handlers())
        self._server.add(self.transfers.handoffs.handlers())
        if peers is not None:
            self._server.add(self.transfers.loans.handlers(self.control.name_blocks))
        await self._server.start()
        await asyncio.to_thread(self._loop.start)
        if tiers is not None and self.settings.tiers.disk_path:
            listing = self.tasks.start(self._list_files())
            await asyncio.wait([listing], timeout=_FIRST_LIST_S)
            self.tasks.start(self._watch_files())
        self.control.become(WorkerState.READY)
        return self.ref

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        """These workers take requests now: one that computes prompts prepares links to those that
        decode, first to those that routers pair it with where there are many."""
        self._peers = workers
        for ref in _nearest(self.ref, workers) if self.control.role is Role.PREFILL else ():
            self.tasks.start(self.transfers.handoffs.sender.warm_up(ref))

    def peers_left(self, epochs: frozenset[int]) -> None:
        """These workers left the cluster or expired: end the hand-offs with them now."""
        for epoch in epochs:
            self.tasks.start(self.transfers.handoffs.peer_lost(epoch))

    async def drain(self, timeout_s: float) -> bool:
        return await self.control.drained(timeout_s)

    async def stop(self) -> None:
        """End at once: running requests fail, and their routers resume them elsewhere."""
        self.control.become(WorkerState.STOPPED)
        self.control.close()
        await asyncio.to_thread(self._loop.stop)
        await self.tasks.shutdown()
        await self.transfers.handoffs.close()
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
            lambda: load_ranks(settings.engine, settings.transfer, settings.tiers, self._group),
            low_priority=self._group is None,  # threads that ranks meet through would inherit it
        )
        self.ranks = await run_in_thread(
            lambda: join_ranks(executor, settings.transfer, settings.tiers, self._group),
            low_priority=False,
        )
        self._grammars = await Grammars.load(
            Path(settings.engine.model_path),
            executor.vocab_size,
            threads=settings.worker.grammar_threads,
        )
        if executor.pool.step_events is not None:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def _new_blocks(self) -> BlockAllocator:
        layout = self.ranks.executor.layout
        return BlockAllocator(layout.num_blocks, layout.block_size, layout.groups)

    def _new_peers(self, blocks: BlockAllocator, tiers: KVTiers | None) -> PeerBlocks | None:
        """Without a prefix cache there is nothing to lend."""
        layout, fingerprint = self.ranks.executor.layout, self.ranks.executor.fingerprint
        if not (self.settings.worker.enable_prefix_caching and self.settings.tiers.peers):
            return None
        cache = PrefixCache(blocks, fingerprint=fingerprint, enabled=True, tiers=tiers)
        block_bytes = layout.token_bytes() * layout.block_size
        on_gpu = self.ranks.executor.pool.device.type == "cuda"
        return PeerBlocks(cache, blocks, block_bytes=block_bytes, assumed=_LOANS[on_gpu])

    def _new_schedulers(
        self, blocks: BlockAllocator, tiers: KVTiers | None, peers: PeerBlocks | None
    ) -> dict[Role, Scheduler[Any]]:
        """A scheduler for each role; they share the blocks and the tiers below them."""
        step_rows = self.ranks.executor.step_rows
        return {
            role: scheduler(
                config=self.settings.config(role, step_rows),
                blocks=blocks,
                fingerprint=self.ranks.executor.fingerprint,
                place=self.settings.worker_id,
                tiers=tiers,
                peers=peers,
                step_rows=step_rows,
            )
            for role, scheduler in self.settings.schedulers.items()
        }

    async def _open_tiers(self, blocks: BlockAllocator) -> KVTiers | None:
        """Take host memory on every rank; None without, whatever the reason."""
        config, executor = self.settings.tiers, self.ranks.executor
        layout, device = executor.layout, executor.pool.device.type
        num_slots = num_host_slots(config, layout, on_gpu=device == "cuda")
        if num_slots < 1 or not self.settings.worker.enable_prefix_caching:
            return None
        num_blocks = segment_blocks(config, layout.block_size)
        on_disk = bool(config.disk_path) and blocks.has_one_chain
        keys = [
            files_key(layout, executor.fingerprint, rank, num_blocks)
            for rank in range(layout.tp_size)
        ]
        opened = await await_callback(partial(self.ranks.open_tiers, num_slots, keys))
        if not opened.ok:
            log.warning("host memory for KV is refused: there are no tiers below the pool")
            return None
        return KVTiers(
            blocks,
            num_slots=num_slots,
            slot_bytes=slot_bytes(layout),
            segment_blocks=num_blocks if on_disk else 0,
            num_ranks=layout.tp_size,
            disk_bytes=config.disk_bytes if on_disk else 0,
        )

    async def _list_files(self, *, measure: bool = True) -> None:
        """Tell the scheduler which segments are on disk, and how fast that is."""
        rate = 0.0
        if measure:
            probe = Copy(kind=CopyKind.PROBE, number=0, slots=())
            result = await await_callback(partial(self.ranks.copy, probe))
            num_ranks = self.ranks.executor.layout.tp_size
            rate = result.num_bytes / num_ranks / max(result.seconds, 1e-6)
        names = await await_callback(self.ranks.tiers.list_files)
        if rate or names != self._files:
            self._files = names
            self.inbox.put(FilesListed(names=names, bytes_per_second=rate))

    async def _watch_files(self) -> None:
        """Other workers of the host write them, too."""
        for number in itertools.count(1):
            await asyncio.sleep(_LIST_FILES_S)
            await self._list_files(measure=number % _LISTS_PER_PROBE == 0)

    def _new_step_loop(self, scheduler: BothRoles) -> StepLoop:
        loop = asyncio.get_running_loop()

        def copied(number: int, result: CopyResult) -> None:
            self.inbox.put(CopyDone(number=number, result=result))

        def deliver(out: StepOutput, snapshot: Snapshot, accepted: int) -> None:
            for copy in out.copies:
                self.ranks.copy(copy, partial(copied, copy.number))
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

    def _new_control(self, schedulers: Mapping[Role, Scheduler[Any]]) -> ControlService:
        executor = self.ranks.executor
        layout, limit = executor.layout, executor.max_model_len
        capacity = {
            role: layout.tokens_in(layout.num_blocks, chunk=each.max_chunk, limit=limit)
            for role, each in schedulers.items()
        }
        return ControlService(
            ref=self.ref,
            limits=WorkerLimits(
                layout=layout,
                vocab_size=executor.vocab_size,
                max_model_len=limit,
                capacity=capacity,
            ),
            fingerprint=executor.fingerprint,
            precision=executor.precision,
            config=self.settings.worker,
            progress=self._loop,
            clock=self.clock,
            accept=self.transfers.accept,
            move=self.transfers.move,
            grammars=self._grammars,
            cancel=lambda message: self.inbox.put(
                RequestCancelled(keys=message.keys, unless_begun=message.unless_begun)
            ),
            router_gone=lambda router_id: self.inbox.put(RouterGone(router_id=router_id)),
            role_changed=self._change_role,
            handoff_counters=self.transfers.handoffs.counters,
        )

    def _change_role(self, role: Role) -> None:
        self.inbox.put(RoleChanged(role=role))
        self.peers_joined(self._peers)

    def _deliver(self, out: StepOutput, snapshot: Snapshot, accepted: int) -> None:
        """Take an iteration of the step loop, on the event loop. Questions to lenders go out first,
        then tokens."""
        self.transfers.loans.carry_out(out)
        self.control.publish(out.events, snapshot, accepted)
        self.transfers.carry_out(out)


def _shares_cores(engine: EngineConfig) -> bool:
    """Ranks of one engine wait for each other, so their threads must not vary; a GPU needs none."""
    return engine.device == "cpu" and engine.tp_size == 1 and engine.num_threads is None


def _nearest(own: WorkerRef, workers: Sequence[WorkerRef]) -> list[WorkerRef]:
    """The workers that decode: those first that are as far in the order of names as `own` is among
    those that compute prompts (router.workers.worker_set pairs them so)."""
    names = sorted(ref.worker_id for ref in workers if ref.role is Role.PREFILL)
    decodes = [ref for ref in workers if ref.role is Role.DECODE and ref.epoch != own.epoch]
    decodes.sort(key=lambda ref: ref.worker_id)
    centre = len(decodes) * bisect_left(names, own.worker_id) // max(1, len(names))

    def distance(place: int) -> int:
        apart = abs(place - centre)
        return min(apart, len(decodes) - apart)

    return [decodes[place] for place in sorted(range(len(decodes)), key=distance)]
