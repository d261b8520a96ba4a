"""A worker without hand-offs whose pool is too small for its conversations, over KV tiers. KV is
token ids, so a block that is loaded wrong, too early or too late changes tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

from decode_worker.scheduler import DecodeScheduler
from kv_tiers.commands import Copy, CopyResult, Tier
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.invariants import check_scheduler
from tests.support.paged import LateSteps, PagedTokens, expected_output
from tests.support.sim_tiers import Files, SimTiers
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    CopyDone,
    FilesListed,
    RequestCancelled,
    Submitted,
)

BLOCK = 4
NUM_BLOCKS = 24


class Copies(Protocol):
    """What runs the copies."""

    def start(self, copy: Copy) -> None: ...

    @property
    def busy(self) -> bool: ...

    def step(self) -> None:
        """Do, or wait for, some of the work."""


class World:
    """One decode worker that computes its prompts, and conversations that return to it."""

    def __init__(
        self,
        seed: int,
        *,
        faults: float = 0.0,
        files: Files | None = None,
        engine: PagedTokens | None = None,
        copies: Callable[[World, int], Copies] | None = None,
    ) -> None:
        """`engine` has NUM_BLOCKS blocks of BLOCK tokens; `copies` makes what copies between them
        and so many slots."""
        self.random = random.Random(seed)
        self.files: Files = {} if files is None else files
        self.blocks = WatchedBlocks(NUM_BLOCKS, BLOCK)
        self.engine = engine or PagedTokens(NUM_BLOCKS, BLOCK)
        self.executor = LateSteps(self.engine.run, self.random.choice([1, 2]))
        num_slots = self.random.choice([8, 100])
        self.inbox: deque[Any] = deque()
        self.num_handled = 0
        sim = SimTiers(self.engine, num_slots, self.files, self.random, self.copied)
        sim.fault_rate = faults
        self.ends = sim.ends
        self.copies: Copies = sim if copies is None else copies(self, num_slots)
        segment_blocks = 2 if copies is None else 0
        self.tiers = KVTiers(
            self.blocks, num_slots=num_slots, slot_bytes=1000, segment_blocks=segment_blocks
        )
        self.tiers.costs.rates[Tier.DISK].probed(1e9, 0.0)
        config = WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0)
        common: dict[str, Any] = {"config": config, "place": "here", "fingerprint": FINGERPRINT}
        common |= {"blocks": self.blocks, "tiers": self.tiers}
        self.decode = DecodeScheduler(**common)
        both = {Role.PREFILL: PrefillScheduler(**common), Role.DECODE: self.decode}
        self.scheduler = BothRoles(both, self.blocks, Role.DECODE, self.tiers)
        self.now = 100.0
        self.histories: list[list[int]] = [[i, 1, 2, 3, 4] for i in range(8)]
        self.wanted: dict[RequestKey, tuple[int, list[int]]] = {}
        self.got: dict[RequestKey, list[int]] = {}
        self.cached: Counter[RequestKey] = Counter()

    def copied(self, number: int, result: CopyResult) -> None:
        self.inbox.append(CopyDone(number=number, result=result))

    def ask(self, conversation: int, num_new: int = 3, max_tokens: int | None = None) -> RequestKey:
        """The next turn of a conversation."""
        history = self.histories[conversation]
        history += [self.random.randrange(50) for _ in range(num_new)]
        max_tokens = max_tokens or self.random.choice([1, 3, 6])
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        key = RequestKey(f"r{len(self.wanted)}", 0)
        self.wanted[key] = conversation, expected_output(history, 1, max_tokens)
        self.got[key] = []
        submit = Submit(
            key=key, router_id="r", prompt_ids=tuple(history), sampling=sampling, time_left_s=1e6
        )
        self.inbox.append(Submitted(submit=submit, role=Role.DECODE))
        return key

    def turn(self) -> bool:
        """One iteration of the step loop; whether anything ran."""
        while self.inbox:
            self.scheduler.handle(self.inbox.popleft(), self.now)
            self.num_handled += 1
        batch = self.scheduler.plan(self.now)
        self.take()
        if batch is not None:
            self.blocks.check_writes(batch)
            number = self.executor.launch(batch).number
            if self.executor.lands_early:
                self.land()
            self.scheduler.launched(number)
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.executor.depth):
            self.land()
        return busy

    def land(self) -> None:
        self.scheduler.apply(self.executor.wait(), self.now)
        self.take()

    def take(self) -> None:
        assert self.scheduler.snapshot().load.num_commands == self.num_handled
        out = self.scheduler.take_output()
        for copy in out.copies:
            self.copies.start(copy)
        for events in out.events.values():
            for event in events.tokens:
                self.got[event.key].append(event.token)
            for prompt in events.prompts:
                self.cached[prompt.key] = prompt.num_cached_tokens
            assert not events.failures

    def settle(self) -> None:
        while self.turn() or self.inbox or self.copies.busy:
            while self.copies.busy:
                self.copies.step()
            check_scheduler(self.scheduler)

    def lose_pool(self) -> None:
        taken = self.blocks.allocate(self.blocks.num_available)
        assert taken is not None
        self.blocks.free(taken)

    def run(self, count: int) -> None:
        """Random events until `count` turns were asked for."""
        while len(self.wanted) < count:
            match self.random.randrange(12):
                case 0 if self.decode.num_unfinished < 5:
                    alive = {self.wanted[k][0] for k in self.decode._entries}
                    idle = [
                        i for i, h in enumerate(self.histories) if i not in alive and len(h) < 60
                    ]
                    if not idle:
                        self.histories = [h[:7] for h in self.histories]
                        continue
                    key = self.ask(self.random.choice(idle))
                    if self.random.random() < 0.1:
                        self.inbox.append(RequestCancelled(keys=(key,)))
                        self.wanted[key] = self.wanted[key][0], []
                case 1 if self.decode._entries:
                    key = self.random.choice(list(self.decode._entries))
                    if self.random.random() < 0.1:
                        self.inbox.append(RequestCancelled(keys=(key,)))
                        self.wanted[key] = self.wanted[key][0], []
                case 2 if self.random.random() < 0.1:
                    self.inbox.append(FilesListed(names=frozenset(self.files)))
                case 3:
                    self.now += self.random.choice([0.01, 0.3]) * (self.random.random() < 0.1)
                case 4 | 5 | 6 | 7 if self.copies.busy:
                    self.copies.step()
                case _:
                    self.turn()
            check_scheduler(self.scheduler)
        self.settle()

    def check_outputs(self) -> None:
        for key, (_, wanted) in self.wanted.items():
            assert self.got[key] == wanted or not wanted, key
        assert self.decode.num_unfinished == 0
        assert self.blocks.num_available == NUM_BLOCKS
        assert self.tiers.slots.num_leased == 0
