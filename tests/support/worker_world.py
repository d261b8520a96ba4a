"""The world of tests.support.worker_sim: its router, its faults, what must hold."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from kv_transfer.config import TransferConfig
from protocol.errors import BatonError, Internal
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import ONE_GROUP, KVGroup
from protocol.messages import MoveRequest, PrefixSource, Submit, Ticket
from protocol.sampling import SamplingParams
from tests.support.faults import Faults
from tests.support.paged import expected_output
from tests.support.sim_tiers import Files
from tests.support.transfer import SECRET
from tests.support.transfer_net import Fabric, Network, Op, SimLoop
from tests.support.transfer_sim import CONFIG
from tests.support.worker_sim import SimWorker
from worker_runtime.scheduling.messages import (
    RequestCancelled,
    RouterEvents,
    Submitted,
)

REFS = [
    WorkerRef(worker_id=name, epoch=epoch, role=role, address=f"{name}:1")
    for name, epoch, role in (
        ("p", 11, Role.PREFILL),
        ("d", 22, Role.DECODE),
        ("e", 33, Role.DECODE),
    )
]
STEM = [7, 3, 8, 1, 9, 2, 6, 4, 5, 3, 8, 8, 1, 4, 4, 2]


@dataclass
class Job:
    """One request as its router sees it. keys: whose tokens it takes, the newest last; all but
    that one belong to workers that it has left. moving: to another worker, under the next key."""

    prompt: list[int]
    sampling: SamplingParams
    deadline: float
    window: int | None = None
    attempt: int = -1
    keys: list[RequestKey] = field(default_factory=list)
    holder: SimWorker | None = None  # where it decodes, once a token has come from there
    moving: RequestKey | None = None
    num_tries: int = 0
    num_moves: int = 0
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
    """Workers and a router. `fault_rate` is the share of events that are faults, if there were two
    workers, `move_rate` that of moves of running sequences, `back_rate` of prompts asked back."""

    def __init__(
        self,
        seed: int,
        *,
        fault_rate: float,
        one_sided: bool,
        move_rate: float = 0.1,
        back_rate: float = 0.02,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
    ) -> None:
        self.groups = groups
        self.random = random.Random(seed)
        self.fault_rate = fault_rate
        self.files: dict[int, Files] = {}  # of KV tiers, by block size
        self.move_rate = move_rate
        self.back_rate = back_rate
        self.one_sided = one_sided
        self.loop = SimLoop()
        self.network = Network(self.loop)
        self.fabric = Fabric(self.loop)
        choose = self.random.choice
        self.config = choose([CONFIG, TransferConfig(**SMALL_PIECES)])
        self.faults = Faults()
        logging.getLogger("baton").addHandler(self.faults)
        sizes = [choose([4, 4, 2, 8, 6]), 4, choose([4, 4, 2, 8])]
        room = [choose([12, 24, 60]), choose([14, 24, 60]), choose([14, 24, 60])]
        self.names: dict[tuple[int, int], RequestKey] = {}  # of receivers' generations
        self.workers = [
            SimWorker(self, ref, num_blocks, size)
            for ref, num_blocks, size in zip(REFS, room, sizes, strict=True)
        ]
        self.jobs: dict[str, Job] = {}
        self.counted: set[RequestKey] = set()  # of which a worker has said what was cached
        self.coming: list[Callable[[], object]] = []  # messages of the router
        self.ends: Counter[str] = Counter()
        self.num_given_back = 0

    def of_epoch(self, epoch: int) -> SimWorker:
        return next(worker for worker in self.workers if worker.ref.epoch == epoch)

    def key_of(self, op: Op) -> RequestKey:
        """Whose blocks a message moves."""
        return self.names[op.command.receiver_epoch, op.command.generation]

    # --- the router -----------------------------------------------------------------------------

    def new_job(self) -> None:
        choose = self.random.choice
        rest = [self.random.randrange(3) for _ in range(choose([1, 1, 2, 5, 9, 17]))]
        name = f"r{len(self.jobs)}"
        self.jobs[name] = Job(
            prompt=STEM[: choose([0, 3, 4, 8, 12, 13, 16])] + rest,
            sampling=SamplingParams(
                seed=choose([0, 1, 2]),
                max_tokens=choose([1, 2, 3, 8, 14, 26] + [60] * (self.fault_rate < 0.05)),
                ignore_eos=True,
            ),
            deadline=self.loop.now + choose([30.0, 200.0]),
            window=self.groups[0].window,
        )
        self._try(name)

    def _try(self, name: str) -> None:
        """The next attempt, with what the client has already."""
        job = self.jobs[name]
        if job.num_tries == 4 or job.deadline <= self.loop.now:
            self._end(job, "given up")
            return
        job.num_tries += 1
        job.attempt += 1
        key = RequestKey(name, job.attempt)
        job.keys, job.holder, job.moving = [key], None, None
        # Workers send prompts to those of larger numbers, so that no two wait for each other.
        sender, receiver = sorted(self.random.sample(range(3), 2))
        prefill, decode = self.workers[sender], self.workers[receiver]
        if self.random.random() < 0.15:
            self._submit_soon(decode, key, None)
            return
        self._submit_soon(decode, key, (prefill, decode))
        self._submit_soon(prefill, key, (prefill, decode))

    def _submit_soon(
        self,
        worker: SimWorker,
        key: RequestKey,
        pair: tuple[SimWorker, SimWorker] | None,
        *,
        live: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        job = self.jobs[key.request_id]
        output, left = tuple(job.output), job.deadline - self.loop.now
        computes = not live and (pair is None or worker is pair[0])
        submit = Submit(
            key=key,
            router_id="r",
            prompt_ids=tuple(job.prompt),
            output_ids=output,
            sampling=job.sampling,
            time_left_s=left,
            live=live,
            source=self._source(worker, key, job, left) if computes else None,
        )
        if pair is None:
            self.coming.append(partial(self._submit, worker, Submitted(submit=submit), then))
            return
        sender, receiver = pair
        ticket = self._ticket(key, pair, len(job.prompt) + len(output), left)
        sends = worker is sender
        command = Submitted(
            submit=structs.replace(
                submit, peer=receiver.ref if sends else sender.ref, ticket=ticket
            ),
            role=Role.PREFILL if sends else Role.DECODE,
        )
        self.coming.append(partial(self._submit, worker, command, then))

    def _source(
        self, worker: SimWorker, key: RequestKey, job: Job, left: float
    ) -> PrefixSource | None:
        """Another worker that may have some of the prompt, or not."""
        if self.random.random() < 0.3:
            return None
        holder = self.random.choice([each for each in self.workers if each is not worker])
        num_tokens = self.random.choice([8, 12, 16, len(job.prompt) + len(job.output)])
        ticket = self._ticket(key.loan, (holder, worker), num_tokens, left)
        if self.random.random() < 0.05:
            ticket = ticket.signed(b"of another router")
        return PrefixSource(worker=holder.ref, ticket=ticket, num_tokens=num_tokens)

    def _ticket(
        self, key: RequestKey, pair: tuple[SimWorker, SimWorker], num_tokens: int, left: float
    ) -> Ticket:
        sender, receiver = pair
        return Ticket(
            key=key,
            sender_epoch=sender.ref.epoch,
            receiver_epoch=receiver.ref.epoch,
            num_blocks=receiver.blocks.pages_for(num_tokens),
            lifetime_s=left,
        ).signed(SECRET)

    def _submit(self, worker: SimWorker, command: Submitted, then: Callable[[], None]) -> None:
        key = command.submit.key
        if not self._is_wanted(key):
            return
        if self._call(partial(worker.transfers.accept, command)):
            then()
        else:
            self._failed(key)

    def _call(self, act: Callable[[], object]) -> bool:
        """Call a worker; whether it was accepted."""

        async def call() -> None:
            if self.random.random() < self.fault_rate / 8:
                raise Internal("lost")
            act()

        error = self.loop.run(call()).exception()
        if error is not None and not isinstance(error, BatonError):
            raise error
        return error is None

    def move_one(self) -> None:
        """Have a running sequence leave its worker for another."""
        movable = [
            name
            for name, job in self.jobs.items()
            if job.holder is not None and job.moving is None and not job.done
        ]
        if not movable:
            return
        name = self.random.choice(movable)
        job = self.jobs[name]
        source = job.holder
        assert source is not None
        target = self.random.choice([each for each in self.workers if each is not source])
        job.attempt += 1
        job.num_moves += 1
        to = job.moving = RequestKey(name, job.attempt)
        pair = (source, target)
        left = job.deadline - self.loop.now
        move = MoveRequest(
            key=job.keys[-1],
            to=to,
            ticket=self._ticket(to, pair, len(job.prompt) + len(job.output), left),
            num_output=len(job.output),
            peer=target.ref,
        )

        def leave() -> None:
            if job.moving == to and not self._call(partial(source.transfers.move, move)):
                self._failed(to)

        then = partial(self.coming.append, leave)
        self._submit_soon(target, to, pair, live=True, then=then)

    def ask_back(self) -> None:
        """Want an attempt back from a worker, unless it has begun with the prompt."""
        alive = [job.keys[-1] for job in self.jobs.values() if not job.done and not job.output]
        if alive:
            back = RequestCancelled(keys=(self.random.choice(alive),), unless_begun=True)
            worker = self.random.choice(self.workers)
            self.coming.append(partial(worker.inbox.append, back))

    def _is_wanted(self, key: RequestKey) -> bool:
        job = self.jobs[key.request_id]
        return not job.done and (key in job.keys or key == job.moving)

    def _failed(self, key: RequestKey) -> None:
        job = self.jobs[key.request_id]
        if job.done:
            return
        if key == job.moving:  # it goes on where it is
            job.moving = None
            self._cancel(key)
        elif key == job.keys[-1]:
            self._cancel_all(job)
            self._try(key.request_id)

    def _cancel_all(self, job: Job) -> None:
        for key in (*job.keys, *([job.moving] if job.moving else [])):
            self._cancel(key)

    def _cancel(self, key: RequestKey) -> None:
        for worker in self.workers:
            if self.random.random() > self.fault_rate / 4:  # else it gets lost
                self.coming.append(partial(worker.inbox.append, RequestCancelled(keys=(key,))))

    def _end(self, job: Job, how: str) -> None:
        job.done = True
        self.ends[how] += 1

    def take(self, worker: SimWorker, events: Mapping[str, RouterEvents]) -> None:
        """What a worker says. Every token must be right, also those that come too late."""
        self.counted.update(event.key for each in events.values() for event in each.prompts)
        for event in (event for each in events.values() for event in each.tokens):
            assert event.index or event.key in self.counted
            job = self.jobs[event.key.request_id]
            assert event.token == job.wanted[event.index], f"{event.key}: token {event.index}"
            if not self._is_wanted(event.key):
                continue
            # Without faults each token comes from one worker.
            assert self.fault_rate or event.index not in job.tokens, f"{event.key} came twice"
            job.tokens[event.index] = event.token
            if event.key == job.moving:
                job.keys.append(event.key)
                job.moving, job.holder = None, worker
            elif event.key == job.keys[-1]:
                job.holder = job.holder or self._decoder(worker, event.key)
            if len(job.output) == len(job.wanted):
                self._end(job, "finished")
                self._cancel_all(job)
        for failure in (event for each in events.values() for event in each.failures):
            if failure.given_back:  # before anything was computed, or brought
                assert failure.key not in self.counted
                self.num_given_back += 1
                self.jobs[failure.key.request_id].num_tries -= 1
            self._failed(failure.key)

    @staticmethod
    def _decoder(worker: SimWorker, key: RequestKey) -> SimWorker | None:
        return worker if key in worker.decode._entries else None

    # --- what happens ---------------------------------------------------------------------------

    def run(self, count: int) -> Counter[str]:
        """How `count` requests ended. Asserts the accounts after every event."""
        for _ in range(400 * count):
            alive = sum(not job.done for job in self.jobs.values())
            if len(self.jobs) < count and alive < 6 and self.random.random() < 0.1:
                self.new_job()
            elif self.random.random() < self.fault_rate * 2 / len(self.workers):
                self._fault()  # as many for a pair of workers, however many share the events
            elif self.random.random() < self.move_rate:
                self.move_one()
            elif self.random.random() < self.back_rate:
                self.ask_back()
            elif len(self.jobs) < count or alive:
                self._progress()
            self._check()
        self._wind_up()
        return self.ends

    def _sendable(self) -> list[Any]:
        """Links whose next message is there: its step is over."""
        return [
            wire
            for wire in self.fabric.can_send()
            if wire.sends[0].command.after <= self.of_epoch(wire.name[0]).executor.num_over
        ]

    def _progress(self) -> None:
        choose, fabric = self.random.choice, self.fabric
        if self.random.random() < 0.05:
            self._turn_clock(0.25)
            return
        ways: list[Callable[[], object]] = [worker.turn for worker in self.workers]
        if self.coming:
            ways.append(self._hear)
        for worker in self.workers:
            ways += [worker.turn] * bool(worker.inbox or worker.executor.launched)
            ways += [worker.deliver] * (2 * bool(worker.outbox))
            ways += [worker.tiers.step] * (4 * worker.tiers.busy)
            ways += [worker.list_files] * (self.random.random() < 0.02)
            ways += [worker.lose_cache] * (self.random.random() < 0.05)
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
                worker, peer = self.random.sample(self.workers, 2)
                self.loop.run(worker.handoffs.peer_lost(peer.ref.epoch))

    def _leave(self) -> None:
        """A client goes, or an attempt is given up."""
        alive = [name for name, job in self.jobs.items() if not job.done]
        if alive:
            name = self.random.choice(alive)
            job = self.jobs[name]
            if self.random.random() < 0.5:
                self._failed(choose_key(self.random, job))
            else:
                self._cancel_all(job)
                self._end(job, "left")

    def _turn_clock(self, seconds: float) -> None:
        self.loop.now += seconds
        self.loop.settle()

    # --- what must hold -------------------------------------------------------------------------

    def _check(self) -> None:
        self.faults.check()
        for worker in self.workers:
            if worker.unchecked:
                worker.check()

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
        for worker in self.workers:
            worker.check()
            assert worker.handoffs.sender.num_live == worker.handoffs.receiver.num_live == 0
            assert not worker.transfers.loans._asked
            assert worker.peers.num_active == 0
            assert worker.prefill.num_unfinished == worker.decode.num_unfinished == 0
            assert worker.blocks.num_available == worker.blocks.num_blocks
        self._close()

    def _run_dry(self) -> None:
        """What workers can do without each other; writes end by themselves."""
        busy = True
        while busy:
            while self.coming:
                self.coming.pop()()
            busy = max([worker.turn() for worker in self.workers])
            for worker in self.workers:
                while worker.outbox:
                    busy = True
                    worker.deliver()
                while worker.tiers.busy:
                    busy = True
                    worker.tiers.step()
            for wire in self._sendable():
                busy = True
                self.fabric.send(wire)

    def _close(self) -> None:
        for worker in self.workers:
            self.loop.run(worker.handoffs.close())
        for _ in range(5):
            for letter in list(self.network.letters):
                self.network.lose(letter)
            self._turn_clock(2.0)
        self.loop.close()
        logging.getLogger("baton").removeHandler(self.faults)


def choose_key(rng: random.Random, job: Job) -> RequestKey:
    """That of the attempt or of its move."""
    return job.moving if job.moving is not None and rng.random() < 0.5 else job.keys[-1]


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
