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
from kv_transfer.control.handoffs import Handoffs
from kv_transfer.control.listeners import TransferReport
from kv_transfer.data.rank_commands import RankCommand, RankResult
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import ONE_GROUP, Cells, KVLayout, pages_for
from protocol.messages import Commit, Grant, Submit
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.invariants import check_scheduler, loan_holder
from tests.support.paged import LateSteps, PagedTokens
from tests.support.sim_tiers import SimTiers
from tests.support.transfer import SECRET
from tests.support.transfer_net import Op, SimRanks
from worker_runtime.config import WorkerConfig
from worker_runtime.control.loans import Loans
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    AnnounceCommit,
    BlocksSafe,
    CommitAnnounced,
    CommitHandoff,
    Committed,
    CopyDone,
    Delivered,
    FilesListed,
    Granted,
    HandoffEnded,
    Push,
    Sent,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache, hash_blocks

LONGEST = 96  # tokens of a request: each pool has room for one
Data = list[tuple[int, ...]]  # the tokens of each cell


class SimWorker:
    """A worker but for its sockets and threads: `turn` is one of its step thread, `deliver` hands
    the oldest output over to its event loop. Also what the fabric takes for its pool, and the
    listener of its hand-offs."""

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
        self.inbox: deque[Any] = deque()
        self.outbox: deque[StepOutput] = deque()
        self.stepped = asyncio.Event()
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
        self.handoffs = Handoffs(context, self)
        self._take = self.handoffs.sender.take
        self.handoffs.sender.take = self._taken  # type: ignore[method-assign]
        tasks: Any = SimTasks(world.loop)
        self.loans = Loans(context, self.handoffs, self.inbox.append, tasks)
        world.network.handlers[ref.address] = {
            **self.handoffs.handlers(),
            **self.loans.handlers(self._name_blocks),
        }
        world.loop.run(self.handoffs.start())

    async def _name_blocks(self, submit: Submit) -> tuple[bytes, ...]:
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
        now = self.world.loop.now
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
        self.unchecked = False

    def list_files(self) -> None:
        """The scheduler hears which files there are."""
        self.inbox.append(FilesListed(names=frozenset(self.world.files[self.block])))

    def deliver(self) -> None:
        out = self.outbox.popleft()
        self.world.take(self, out.events)

        async def carry_out() -> None:
            self.carry_out(out)

        self.world.loop.run(carry_out()).result()

    def carry_out(self, out: StepOutput) -> None:
        start, sender = self.world.loop.create_task, self.handoffs.sender
        receiver = self.handoffs.receiver
        self.loans.carry_out(out)
        for order in out.sends:
            match order:
                case Push():
                    key, ids, first = order.key, order.block_ids, order.first_block
                    sender.push(key, ids, first, group=order.group, after=order.after)
                case AnnounceCommit(key=key, at=at):
                    sender.announce_commit(key, max(0.0, at - self.world.loop.time()))
                case CommitHandoff(key=key, tokens=tokens, held=held):
                    sender.commit(key, tokens, held=held)
                case _:
                    start(sender.end(order.key, order.released, order.error))
        for reserve in out.reserves:
            tables, there = reserve.block_tables, reserve.num_cached_blocks
            start(receiver.reserve(reserve.key, tables, there, reserve.num_tokens))
        for end in out.ends:
            start(receiver.end(end.key, end.released, end.error))

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

    # --- the listener ---------------------------------------------------------------------------

    def _taken(self, grant: Grant) -> bool:
        self.world.names[grant.decode.epoch, grant.generation] = grant.key
        return self._take(grant)

    def granted(self, key: RequestKey, grant: Grant) -> None:
        there = grant.num_cached_blocks * grant.layout.block_size
        self.inbox.append(Granted(key=key, num_cached_tokens=there, num_tokens=grant.num_tokens))

    def sent(self, key: RequestKey) -> None:
        self.inbox.append(Sent(key=key))

    def delivered(self, key: RequestKey, report: TransferReport) -> None:
        self.inbox.append(Delivered(key=key, report=report))

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        self.inbox.append(CommitAnnounced(key=key, at=self.world.loop.time() + in_s))

    def committed(self, key: RequestKey, commit: Commit) -> None:
        self.inbox.append(Committed(key=key, tokens=commit.tokens, held=commit.held))

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        self.loans.ended(key)
        self.inbox.append(HandoffEnded(key=key, error=error, uncertain=uncertain))

    def blocks_safe(self, key: RequestKey, _block_ids: tuple[int, ...]) -> None:
        self.inbox.append(BlocksSafe(key=key))


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
