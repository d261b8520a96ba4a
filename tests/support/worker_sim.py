"""Both schedulers with a sender and a receiver between them, in a simulated world that picks the
next event at random: steps, event loop iterations, messages, data, faults, client actions.

KV is token ids (tests.support.paged), so every sampled token shows whether its blocks held the
right contents: blocks that are shared, sent, released or overwritten too early change tokens.
Simulated time advances only explicitly.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from decode_worker.lifecycle import BlocksSafe, CommitAnnounced, Committed
from decode_worker.lifecycle import DecodeOutput as DecodeOutput
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import Clock, EndpointContext
from kv_transfer.control.listeners import TransferReport
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from kv_transfer.data.rank_commands import RankCommand, RankResult
from prefill_worker.lifecycle import AnnounceCommit, CommitHandoff, Delivered, Granted, Push
from prefill_worker.lifecycle import PrefillOutput as PrefillOutput
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import BatonError, ErrorInfo, Internal
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import ONE_GROUP, Cells, KVGroup, KVLayout, pages_for
from protocol.messages import Commit, Grant, Submit, Ticket
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.paged import LateSteps, PagedTokens, expected_output
from tests.support.transfer import SECRET
from tests.support.transfer_net import Fabric, Network, Op, SimLoop, SimRanks
from tests.support.transfer_sim import CONFIG, Faults
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.messages import (
    HandoffEnded,
    RequestCancelled,
    RouterEvents,
    Submitted,
)

PREFILL = WorkerRef(worker_id="p", epoch=11, role=Role.PREFILL, address="p:1")
DECODE = WorkerRef(worker_id="d", epoch=22, role=Role.DECODE, address="d:1")
STEM = [7, 3, 8, 1, 9, 2, 6, 4, 5, 3, 8, 8, 1, 4, 4, 2]
LONGEST = 60  # tokens of a request: each pool has room for one
Data = list[tuple[int, ...]]  # the tokens of each cell


class SimWorker(ABC):
    """A worker but for its sockets and threads: `turn` is one of its step thread, `deliver` hands
    the oldest output over to its event loop. Also what the fabric takes for its pool."""

    def __init__(self, world: WorkerWorld, scheduler: Any, num_blocks: int, block: int) -> None:
        choose = world.random.choice
        config = WorkerConfig(
            max_num_seqs=choose([2, 8]),
            max_num_batched_tokens=choose([8, 16]),
            watermark=0.0,
            starvation_s=choose([1.0, 5.0, 30.0]),
        )
        groups = world.groups
        num_blocks = max(
            num_blocks * 4 // block * len(groups),
            pages_for(groups, block, LONGEST, 2 * config.max_num_batched_tokens),
        )
        self.world = world
        self.block = block
        self.blocks = WatchedBlocks(num_blocks, block, groups)
        self.engine = PagedTokens(num_blocks, block, groups)
        self.executor = LateSteps(self.engine.run, choose([1, 2]))
        self.scheduler = scheduler(
            config=config, blocks=self.blocks, fingerprint=FINGERPRINT, place="here"
        )
        self.inbox: deque[object] = deque()
        self.outbox: deque[Any] = deque()
        self.stepped = asyncio.Event()

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
        """Whether anything ran."""
        now = self.world.loop.now
        while self.inbox:
            self.scheduler.handle(self.inbox.popleft(), now)
        batch = self.scheduler.plan(now)
        self._publish()
        if batch is not None:
            self.blocks.check_writes(batch)
            self.scheduler.launched(self.executor.launch(batch).number)
            self._publish()
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.executor.depth):
            self.scheduler.apply(self.executor.wait(), now)
            self._publish()
            self.stepped.set()
            self.world.loop.settle()
        return busy

    def _publish(self) -> None:
        if self.scheduler.output:
            self.outbox.append(self.scheduler.take_output())

    def deliver(self) -> None:
        out = self.outbox.popleft()
        self.world.take(out.events)

        async def carry_out() -> None:
            self.carry_out(out)

        self.world.loop.run(carry_out()).result()

    @abstractmethod
    def carry_out(self, out: Any) -> None:
        """Do what the scheduler has decided about hand-offs."""

    def entry(self, op: Op) -> Any:
        """Whose blocks a message moves."""
        key = self.world.names[op.command.generation]
        entry = self.scheduler._entries.get(key)
        assert entry is not None, f"blocks of {key} are touched, which is gone"
        return entry

    def places(self, cells: Cells) -> list[tuple[list[int], slice]]:
        places = zip(*cells.places(self.block // cells.size), strict=True)
        size = cells.size
        return [(self.engine.slots[b], slice(n * size, (n + 1) * size)) for b, n in places]


class SimPrefill(SimWorker):
    """With a sender, of which it is the listener."""

    def gather(self, op: Op) -> Data:
        cells = op.command.cells
        assert set(cells.blocks) <= set(self.entry(op).sequence.tables.blocks()), (
            "blocks given back"
        )
        return [tuple(slots[part]) for slots, part in self.places(cells)]

    def carry_out(self, out: PrefillOutput) -> None:
        sender = self.world.sender
        for order in out.handoffs:
            match order:
                case Push():
                    key, ids, first = order.key, order.block_ids, order.first_block
                    sender.push(key, ids, first, group=order.group, after=order.after)
                case AnnounceCommit(key=key, in_s=in_s):
                    sender.announce_commit(key, in_s)
                case CommitHandoff(key=key, first_token=token):
                    sender.commit(key, token)
                case _:
                    self.world.loop.create_task(sender.end(order.key, order.released, order.error))

    def granted(self, key: RequestKey, grant: Grant) -> None:
        self.world.names[grant.generation] = key
        there = grant.num_cached_blocks * grant.layout.block_size
        self.inbox.append(Granted(key=key, num_cached_tokens=there))

    def committed(self, key: RequestKey, report: TransferReport) -> None:
        self.inbox.append(Delivered(key=key, report=report))

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        self.inbox.append(HandoffEnded(key=key, error=error))


class SimDecode(SimWorker):
    """With a receiver, of which it is the listener."""

    def scatter(self, op: Op, data: Data) -> None:
        if data:  # else a message of a hand-off that is over at its sender
            self._put(op, op.command.cells, data)

    def write(self, op: Op, data: Data) -> None:
        assert op.command.peer_cells is not None
        self._put(op, op.command.peer_cells, data)

    def _put(self, op: Op, cells: Cells, data: Data) -> None:
        entry = self.entry(op)
        assert entry.state in (RequestState.RECEIVING, RequestState.ENDING)
        assert set(cells.blocks) <= set(entry.sequence.tables.blocks()), "blocks of another request"
        for block in cells.blocks:
            assert block not in self.blocks._names
            assert self.blocks._references[block] <= 1
        for (slots, part), tokens in zip(self.places(cells), data, strict=True):
            slots[part] = tokens

    def carry_out(self, out: DecodeOutput) -> None:
        start, receiver = self.world.loop.create_task, self.world.receiver
        for reserve in out.reserves:
            held, there = reserve.block_tables, reserve.num_cached_blocks
            start(receiver.reserve(reserve.key, held, there, reserve.num_tokens))
        for end in out.ends:
            start(receiver.end(end.key, end.released, end.error))

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        self.inbox.append(CommitAnnounced(key=key, at=self.world.loop.time() + in_s))

    def committed(self, key: RequestKey, commit: Commit) -> None:
        self.inbox.append(Committed(key=key, first_token=commit.first_token))

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        self.inbox.append(HandoffEnded(key=key, error=error))

    def blocks_safe(self, key: RequestKey, _block_ids: tuple[int, ...]) -> None:
        self.inbox.append(BlocksSafe(key=key))


class SteppingRanks(SimRanks):
    """A rank whose pool is there only after steps."""

    async def _run(self, rank: int, command: RankCommand) -> RankResult:
        if command.ready is None:
            return await super()._run(rank, command)
        worker: Any = self._worker
        while worker.executor.num_over < command.ready.after:
            worker.stepped.clear()
            await worker.stepped.wait()
        return RankResult()


@dataclass
class Job:
    """One request as its router sees it."""

    prompt: list[int]
    sampling: SamplingParams
    deadline: float
    window: int | None = None
    attempt: int = -1
    tokens: dict[int, int] = field(default_factory=dict)
    done: bool = False

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.wanted = expected_output(self.prompt, sampling.seed, sampling.max_tokens, self.window)

    @property
    def output(self) -> list[int]:
        """What the client has."""
        count = next(n for n in range(len(self.wanted) + 1) if n not in self.tokens)
        return self.wanted[:count]


class WorkerWorld:
    """A pair of workers and a router. `fault_rate` is the share of events that are faults."""

    def __init__(
        self,
        seed: int,
        *,
        fault_rate: float,
        one_sided: bool,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
    ) -> None:
        self.groups = groups
        self.random = random.Random(seed)
        self.fault_rate = fault_rate
        self.loop = SimLoop()
        self.network = Network(self.loop)
        self.fabric = Fabric(self.loop)
        choose = self.random.choice
        sizes = choose([(4, 4), (4, 4), (4, 4), (2, 4), (8, 4), (6, 4)])
        self.prefill = SimPrefill(self, PrefillScheduler, choose([12, 24, 60]), sizes[0])
        self.decode = SimDecode(self, DecodeScheduler, choose([14, 24, 60]), sizes[1])
        config = choose([CONFIG, TransferConfig(**SMALL_PIECES)])
        target = self.decode if one_sided else None

        def context(ref: WorkerRef, worker: Any) -> EndpointContext:
            return EndpointContext(
                ref=ref,
                layout=worker.layout,
                fingerprint=FINGERPRINT,
                secret=SECRET,
                ranks=SteppingRanks(self.fabric, worker, target),
                clients=self.network,  # type: ignore[arg-type]
                config=config,
                clock=Clock(monotonic=self.loop.time, wall=self.loop.time),
            )

        self.sender = Sender(context(PREFILL, self.prefill), self.prefill)
        self.receiver = Receiver(context(DECODE, self.decode), self.decode)
        self.network.handlers[PREFILL.address] = self.sender.handlers()
        self.network.handlers[DECODE.address] = self.receiver.handlers()
        self.faults = Faults()
        logging.getLogger("baton.kv_transfer").addHandler(self.faults)
        self.loop.run(self.receiver.start())
        self.names: dict[int, RequestKey] = {}  # of generations
        self.jobs: dict[str, Job] = {}
        self.coming: list[Callable[[], object]] = []  # messages of the router
        self.ends: Counter[str] = Counter()

    # --- the router -----------------------------------------------------------------------------

    def new_job(self) -> None:
        choose = self.random.choice
        rest = [self.random.randrange(3) for _ in range(choose([1, 1, 2, 5, 9, 17]))]
        name = f"r{len(self.jobs)}"
        self.jobs[name] = Job(
            prompt=STEM[: choose([0, 3, 4, 8, 12, 13, 16])] + rest,
            sampling=SamplingParams(
                seed=choose([0, 1, 2]), max_tokens=choose([1, 2, 3, 8, 14]), ignore_eos=True
            ),
            deadline=self.loop.now + choose([30.0, 200.0]),
            window=self.groups[0].window,
        )
        self._try(name)

    def _try(self, name: str) -> None:
        """The next attempt, with what the client has already."""
        job = self.jobs[name]
        left = job.deadline - self.loop.now
        if job.attempt == 3 or left <= 0:
            self._end(job, "given up")
            return
        job.attempt += 1
        key = RequestKey(name, job.attempt)
        output = tuple(job.output)

        def submit(peer: WorkerRef | None) -> Submit:
            ticket = Ticket(
                key=key,
                prefill_epoch=PREFILL.epoch,
                decode_epoch=DECODE.epoch,
                num_blocks=self.decode.blocks.pages_for(len(job.prompt) + len(output)),
                lifetime_s=left,
            )
            return Submit(
                key=key,
                router_id="r",
                prompt_ids=tuple(job.prompt),
                output_ids=output,
                sampling=job.sampling,
                time_left_s=left,
                peer=peer,
                ticket=ticket.signed(SECRET),
            )

        if self.random.random() < 0.15:
            self.coming.append(partial(self._submit, self.decode, submit(None)))
            return
        self.coming.append(partial(self._submit, self.decode, submit(PREFILL), self.receiver.offer))
        self.coming.append(partial(self._submit, self.prefill, submit(DECODE), self.sender.expect))

    def _submit(self, worker: SimWorker, submit: Submit, accept: Any = None) -> None:
        if not self._is_current(submit.key):
            return

        async def call() -> None:
            if self.random.random() < self.fault_rate / 8:
                raise Internal("lost")
            if accept is not None:
                accept(submit.key, submit.ticket, submit.peer)
            worker.inbox.append(Submitted(submit=submit))

        error = self.loop.run(call()).exception()
        if isinstance(error, BatonError):
            self._failed(submit.key)
        elif error is not None:
            raise error

    def _is_current(self, key: RequestKey) -> bool:
        job = self.jobs[key.request_id]
        return key.attempt == job.attempt and not job.done

    def _failed(self, key: RequestKey) -> None:
        if self._is_current(key):
            self._cancel(key)
            self._try(key.request_id)

    def _cancel(self, key: RequestKey) -> None:
        for worker in (self.prefill, self.decode):
            if self.random.random() > self.fault_rate / 4:  # else it gets lost
                self.coming.append(partial(worker.inbox.append, RequestCancelled(keys=(key,))))

    def _end(self, job: Job, how: str) -> None:
        job.done = True
        self.ends[how] += 1

    def take(self, events: Mapping[str, RouterEvents]) -> None:
        """What a worker says. Every token must be right, also those that come too late."""
        for event in (event for each in events.values() for event in each.tokens):
            job = self.jobs[event.key.request_id]
            assert event.token == job.wanted[event.index], f"{event.key}: token {event.index}"
            if not self._is_current(event.key):
                continue
            job.tokens[event.index] = event.token
            if len(job.output) == len(job.wanted):
                self._end(job, "finished")
                self._cancel(event.key)
        for failure in (event for each in events.values() for event in each.failures):
            self._failed(failure.key)

    # --- what happens ---------------------------------------------------------------------------

    def run(self, count: int) -> Counter[str]:
        """How `count` requests ended. Asserts the accounts after every event."""
        for _ in range(400 * count):
            alive = sum(not job.done for job in self.jobs.values())
            if len(self.jobs) < count and alive < 6 and self.random.random() < 0.1:
                self.new_job()
            elif self.random.random() < self.fault_rate:
                self._fault()
            elif len(self.jobs) < count or alive:
                self._progress()
            self._check()
        self._wind_up()
        return self.ends

    def _sendable(self) -> list[Any]:
        """Links whose next message is there: its step is over."""
        over = self.prefill.executor.num_over
        return [wire for wire in self.fabric.can_send() if wire.sends[0].command.after <= over]

    def _progress(self) -> None:
        choose, fabric = self.random.choice, self.fabric
        if self.random.random() < 0.05:
            self._turn_clock(0.25)
            return
        ways: list[Callable[[], object]] = [self.prefill.turn, self.decode.turn]
        if self.coming:
            ways.append(self._hear)
        for worker in (self.prefill, self.decode):
            ways += [worker.turn] * bool(worker.inbox or worker.executor.launched)
            ways += [worker.deliver] * (2 * bool(worker.outbox))
        if self.network.letters:
            ways += [partial(self.network.deliver, choose(self.network.next()))] * 2
        if sendable := self._sendable():
            ways += [partial(fabric.send, choose(sendable))] * 2
        if receivable := fabric.can_receive():
            ways += [partial(fabric.receive, choose(receivable))] * 2
        choose(ways)()

    def _hear(self) -> None:
        """One of the router's messages arrives."""
        self.coming.pop(self.random.randrange(len(self.coming)))()

    def _fault(self) -> None:
        choose, network = self.random.choice, self.network
        match self.random.randrange(10):
            case 0 | 1 | 2 | 3 if network.letters:
                how = choose([network.repeat, network.lose, network.delay, network.lose_reply])
                how(choose(network.letters))
            case 4 if self.fabric.wires:
                self.fabric.snap(choose(list(self.fabric.wires.values())))
                self.loop.settle()
            case 5:
                self._turn_clock(choose([0.5, 6.0]))
            case 6 | 7:
                self._leave()
            case 8 if self.random.random() < 0.2:
                self.loop.run(self.receiver.peer_lost(PREFILL.epoch))
            case 9 if self.random.random() < 0.2:
                self.loop.run(self.sender.peer_lost(DECODE.epoch))

    def _leave(self) -> None:
        """A client goes, or an attempt is given up."""
        alive = [name for name, job in self.jobs.items() if not job.done]
        if alive:
            name = self.random.choice(alive)
            key = RequestKey(name, self.jobs[name].attempt)
            if self.random.random() < 0.5:
                self._failed(key)
            else:
                self._cancel(key)
                self._end(self.jobs[name], "left")

    def _turn_clock(self, seconds: float) -> None:
        self.loop.now += seconds
        self.loop.settle()

    # --- what must hold -------------------------------------------------------------------------

    def _check(self) -> None:
        for record in self.faults.records:
            raise AssertionError(record.getMessage()) from (record.exc_info or (0, None))[1]
        self.prefill.scheduler.check()
        self.decode.scheduler.check()

    def _wind_up(self) -> None:
        """Lose all messages, then refuse them; afterwards no request or block may be left."""
        for job in self.jobs.values():
            job.done = True
        for give_up in (self.network.lose, self.network.refuse):
            for _ in range(40):
                self._run_dry()
                for letter in list(self.network.letters):
                    give_up(letter)
                for wire in list(self.fabric.wires.values()):
                    self.fabric.snap(wire)
                self._turn_clock(10.0)
                self._check()
        assert self.sender.num_live == self.receiver.num_live == 0
        for worker in (self.prefill, self.decode):
            assert worker.scheduler.num_unfinished == 0
            assert worker.blocks.num_available == worker.blocks.num_blocks
        self._close()

    def _run_dry(self) -> None:
        """What workers can do without each other; writes end by themselves."""
        busy = True
        while busy:
            while self.coming:
                self.coming.pop()()
            busy = self.prefill.turn() | self.decode.turn()
            for worker in (self.prefill, self.decode):
                while worker.outbox:
                    busy = True
                    worker.deliver()
            for wire in self._sendable():
                busy = True
                self.fabric.send(wire)

    def _close(self) -> None:
        self.loop.run(self.sender.close())
        self.loop.run(self.receiver.close())
        for _ in range(5):
            for letter in list(self.network.letters):
                self.network.lose(letter)
            self._turn_clock(2.0)
        self.loop.close()
        logging.getLogger("baton.kv_transfer").removeHandler(self.faults)


SMALL_PIECES: dict[str, Any] = {
    "lease_s": 60,
    "op_timeout_s": 10,
    "rpc_timeout_s": 1,
    "rpc_attempts": 2,
    "repair_s": 5,
    "max_piece_bytes": 1,
    "device_piece_bytes": 1,
    "pipeline_depth": 3,
}
