"""Three workers with the schedulers and hand-offs of both roles, in a simulated world that picks
the next event at random: steps, event loop iterations, messages, data, faults, client actions.

Prompts are handed over, running sequences move to another worker. KV is token ids
(tests.support.paged), so every sampled token shows whether its blocks held the right contents:
blocks that are shared, sent, released or overwritten too early change tokens. Simulated time
advances only explicitly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from decode_worker.scheduler import DecodeScheduler
from kv_tiers.commands import CopyResult, Tier
from kv_tiers.cost import TierRate
from kv_transfer.control.context import Clock, EndpointContext
from kv_transfer.data.rank_commands import RankCommand, RankResult
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import Role, WorkerRef
from protocol.kv_layout import ONE_GROUP, Cells, KVLayout, pages_for
from protocol.messages import Grant, Submit
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.invariants import check_scheduler, loan_holder
from tests.support.paged import LateSteps, PagedTokens
from tests.support.sim_tiers import SimTiers
from tests.support.transfer import SECRET
from tests.support.transfer_net import Op, SimRanks
from worker_runtime.config import WorkerConfig
from worker_runtime.control.transfers import Transfers
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    CopyDone,
    FilesListed,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache, hash_blocks

LONGEST = 96  # tokens of a request: each pool has room for one
Data = list[tuple[int, ...]]  # the tokens of each cell


class SimWorker:
    """A worker but for its sockets and threads: `turn` is one of its step thread, `deliver` hands
    the oldest output over to its event loop. Also what the fabric takes for its pool."""

    def __init__(self, world: Any, ref: WorkerRef, num_blocks: int, block: int) -> None:
        choose = world.random.choice
        config = WorkerConfig(
            max_num_seqs=choose([2, 8]),
            max_num_batched_tokens=choose([8, 16]),
            watermark=0.0,
            starvation_s=choose([1.0, 5.0, 30.0]),
            hold_first_s=choose([0.0, 0.2, 1e9]),
        )
        groups = world.groups
        num_blocks = max(
            num_blocks * 4 // block * len(groups),
            pages_for(groups, block, LONGEST, 2 * config.max_num_batched_tokens),
        )
        self.world = world
        self.ref = ref
        self.block = block
        self.blocks = WatchedBlocks(num_blocks, block, groups)
        self.engine = PagedTokens(num_blocks, block, groups)
        self.executor = LateSteps(self.engine.run, choose([1, 2]))
        num_slots = choose([4, 12, 40])
        self.tiers = SimTiers(
            self.engine, num_slots, world.files.setdefault(block, {}), world.random, self._copied
        )
        self.tiers.fault_rate = world.fault_rate / 4
        tiers = None
        if choose([True, True, False]):
            segment_blocks = choose([0, 2]) if groups == ONE_GROUP else 0
            tiers = KVTiers(
                self.blocks,
                num_slots=num_slots,
                slot_bytes=1 << 20,
                segment_blocks=segment_blocks,
            )
            tiers.costs.rates[Tier.DISK].probed(1e9, 0.0)
        common: dict[str, Any] = {
            "blocks": self.blocks,
            "fingerprint": FINGERPRINT,
            "tiers": tiers,
        }
        cache = PrefixCache(self.blocks, fingerprint=FINGERPRINT, enabled=True, tiers=tiers)
        self.peers = common["peers"] = PeerBlocks(cache, self.blocks, block_bytes=1 << 20)
        self.peers.rate = TierRate(choose([1e5, 1e9]))  # so patient it is
        self.prefill = PrefillScheduler(config=config, place="here", **common)
        self.decode = DecodeScheduler(config=config, place="here", **common)
        both = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        self.scheduler = BothRoles(both, self.blocks, ref.role, tiers, self.peers)
        self.inbox = SimInbox()
        self.outbox: deque[StepOutput] = deque()
        self.stepped = asyncio.Event()
        self.planned_at = 0.0
        self.unchecked = True  # turns and `lose_cache` alone change the scheduler and its blocks
        context = EndpointContext(
            ref=ref,
            layout=self.layout,
            fingerprint=FINGERPRINT,
            secret=SECRET,
            ranks=SteppingRanks(world, self),
            clients=world.network,
            config=world.config,
            clock=Clock(monotonic=world.loop.time, wall=world.loop.time),
        )
        tasks: Any = SimTasks(world.loop)
        inbox: Any = self.inbox
        self.transfers = Transfers(context, inbox, tasks, vocab_size=1 << 16, clock=world.loop.time)
        self.handoffs = self.transfers.handoffs
        self._take = self.handoffs.sender.take
        self.handoffs.sender.take = self._taken  # type: ignore[method-assign]
        world.network.handlers[ref.address] = {
            **self.handoffs.handlers(),
            **self.transfers.loans.handlers(self._name_blocks),
        }
        world.loop.run(self.handoffs.start())

    async def _name_blocks(self, submit: Submit) -> tuple[bytes, ...]:
        await asyncio.sleep(self.world.random.choice([0.0, 0.3]))
        return hash_blocks(submit, FINGERPRINT, self.block)

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=self.block,
            num_blocks=self.blocks.num_blocks,
            dtype="float32",
            groups=self.world.groups,
            rank_heads=((0, 1),),
        )

    def turn(self) -> bool:
        self.unchecked = True
        now = self.planned_at = self.world.loop.now
        while self.inbox:
            self.scheduler.handle(self.inbox.popleft(), now)
        batch = self.scheduler.plan(now)
        self._publish()
        if batch is not None:
            self.blocks.check_writes(batch)
            number = self.executor.launch(batch).number
            if self.executor.lands_early:
                self._land(now)
            self.scheduler.launched(number)
            self._publish()
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.executor.depth):
            self._land(now)
            self.stepped.set()
            self.world.loop.settle()
        return busy

    def _land(self, now: float) -> None:
        self.scheduler.apply(self.executor.wait(), now)
        self._publish()

    def _publish(self) -> None:
        self.scheduler.snapshot()
        if self.scheduler.output:
            self.outbox.append(self.scheduler.take_output())
            for copy in self.outbox[-1].copies:
                self.tiers.start(copy)

    def _copied(self, number: int, result: CopyResult) -> None:
        self.inbox.append(CopyDone(number=number, result=result))

    def lose_cache(self) -> None:
        """Other sequences need all blocks for a moment."""
        self.unchecked = True
        taken = self.blocks.allocate(self.blocks.num_available)
        assert taken is not None
        self.blocks.free(taken)

    def check(self) -> None:
        """Assert the invariants of every moment."""
        check_scheduler(self.scheduler)
        for scheduler in (self.prefill, self.decode):
            for entry in scheduler._entries.values():
                assert entry.ending or entry.sequence.deadline > self.planned_at
        for borrowed in self.peers._borrowed.values():
            assert not borrowed.wanted or borrowed.cut_at > self.planned_at
        leaving = (entry for entry in self.decode._entries.values() if entry.departure)
        assert self.decode._departures._entries == {e.departure.key: e for e in leaving}
        for end in (self.handoffs.sender, self.handoffs.receiver):
            rings = set(end._deadlines._heap)
            for key, handoff in end._live.items():
                assert (handoff.deadline, *key) in rings, key
        for key, handoff in self.handoffs.receiver._live.items():
            if handoff.generation and handoff.waits_for_sender:
                assert (handoff.check_by, *key) in rings, key
        self.unchecked = False

    def list_files(self) -> None:
        """The scheduler hears which files there are."""
        self.inbox.append(FilesListed(names=frozenset(self.world.files[self.block])))

    def deliver(self) -> None:
        out = self.outbox.popleft()
        self.world.take(self, out.events)

        async def carry_out() -> None:
            self.transfers.loans.carry_out(out)
            self.transfers.carry_out(out)

        self.world.loop.run(carry_out()).result()

    # --- the pool -------------------------------------------------------------------------------

    def places(self, cells: Cells) -> list[tuple[list[int], slice]]:
        places = zip(*cells.places(self.block // cells.size), strict=True)
        size = cells.size
        return [(self.engine.slots[b], slice(n * size, (n + 1) * size)) for b, n in places]

    def gather(self, op: Op) -> Data:
        cells, key = op.command.cells, self.world.key_of(op)
        entry = self.prefill._entries.get(key) or self.decode._departures.find(key)
        holder = loan_holder(self.peers, key) if entry is None else entry.sequence
        assert holder is not None, f"blocks of {key} are read, which is gone"
        assert set(cells.blocks) <= set(holder.tables.blocks()), "blocks given back"
        return [tuple(slots[part]) for slots, part in self.places(cells)]

    def scatter(self, op: Op, data: Data) -> None:
        if data:  # else a message of a hand-off that is over at its sender
            self._put(op, op.command.cells, data)

    def write(self, op: Op, data: Data) -> None:
        assert op.command.peer_cells is not None
        self._put(op, op.command.peer_cells, data)

    def _put(self, op: Op, cells: Cells, data: Data) -> None:
        key = self.world.key_of(op)
        entry = self.decode._entries.get(key)
        holder = loan_holder(self.peers, key) if entry is None else entry.sequence
        assert holder is not None, "blocks are written whose request is gone"
        assert entry is None or entry.state in (RequestState.RECEIVING, RequestState.ENDING)
        assert set(cells.blocks) <= set(holder.tables.blocks()), "blocks of another request"
        for block in cells.blocks:
            assert block not in self.blocks._names
            assert self.blocks.num_references(block) <= 1
        for (slots, part), tokens in zip(self.places(cells), data, strict=True):
            slots[part] = tokens

    def _taken(self, grant: Grant) -> bool:
        self.world.names[grant.decode.epoch, grant.generation] = grant.key
        return self._take(grant)


class SimInbox(deque[Any]):
    """The way into the step thread (worker_runtime.step_loop.Inbox)."""

    def put(self, command: Any) -> int:
        self.append(command)
        return 0


class SimTasks:
    """Background work on the simulated loop (concurrency.event_loop.Tasks)."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.create_task(work)


class SteppingRanks(SimRanks):
    """A rank whose pool is there only after steps. With one-sided links it writes into the pool of
    any worker."""

    def __init__(self, world: Any, worker: SimWorker) -> None:
        super().__init__(world.fabric, worker, worker if world.one_sided else None)
        self._world = world

    async def _run(self, rank: int, command: RankCommand) -> RankResult:
        move = command.send or command.receive
        if move is not None and self._target is not None:
            self._target = self._world.of_epoch(move.receiver_epoch)
        if command.ready is None:
            return await super()._run(rank, command)
        worker: Any = self._worker
        while worker.executor.num_over < command.ready.after:
            worker.stepped.clear()
            await worker.stepped.wait()
        return RankResult()
