"""A scheduler whose pool is too small for its conversations, over tiers that are slow and fail. KV
is token ids, so a block that is loaded wrong, too early or too late changes tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest

from decode_worker.scheduler import DecodeScheduler
from kv_tiers.commands import CopyKind, CopyResult
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT, WatchedBlocks
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
from worker_runtime.scheduling.step_model import StepModel, StepWork


class QuickModel(StepModel):
    """Computing takes next to no time."""

    known = True

    def predict(self, shape: StepWork) -> float:
        return 1e-6 * shape.num_prompt_tokens


BLOCK = 4
NUM_BLOCKS = 24


class World:
    """One decode worker that computes its prompts, and conversations that return to it."""

    def __init__(self, seed: int, *, faults: float = 0.0, files: Files | None = None) -> None:
        self.random = random.Random(seed)
        self.files: Files = {} if files is None else files
        self.blocks = WatchedBlocks(NUM_BLOCKS, BLOCK)
        self.engine = PagedTokens(NUM_BLOCKS, BLOCK)
        self.executor = LateSteps(self.engine.run, self.random.choice([1, 2]))
        num_slots = self.random.choice([8, 100])
        self.inbox: deque[Any] = deque()
        self.copies = SimTiers(self.engine, num_slots, self.files, self.random, self._copied)
        self.copies.fault_rate = faults
        self.tiers = KVTiers(self.blocks, num_slots=num_slots, slot_bytes=1000, segment_blocks=2)
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

    def _copied(self, number: int, result: CopyResult) -> None:
        self.inbox.append(CopyDone(number=number, result=result))

    def ask(self, conversation: int, num_new: int = 3) -> RequestKey:
        """The next turn of a conversation."""
        history = self.histories[conversation]
        history += [self.random.randrange(50) for _ in range(num_new)]
        sampling = SamplingParams(seed=1, max_tokens=self.random.choice([1, 3, 6]), ignore_eos=True)
        key = RequestKey(f"r{len(self.wanted)}", 0)
        self.wanted[key] = conversation, expected_output(history, 1, sampling.max_tokens)
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
        batch = self.scheduler.plan(self.now)
        self.take()
        if batch is not None:
            self.blocks.check_writes(batch)
            self.scheduler.launched(self.executor.launch(batch).number)
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.executor.depth):
            self.scheduler.apply(self.executor.wait(), self.now)
            self.take()
        return busy

    def take(self) -> None:
        self.scheduler.snapshot()
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
            self.scheduler.check()

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
            self.scheduler.check()
        self.settle()

    def check_outputs(self) -> None:
        for key, (_, wanted) in self.wanted.items():
            assert self.got[key] == wanted or not wanted, key
        assert self.decode.num_unfinished == 0
        assert self.blocks.num_available == NUM_BLOCKS
        assert self.tiers.slots.num_leased == 0


@pytest.mark.parametrize("seed", range(10))
def test_conversations_come_back_unchanged(seed: int) -> None:
    world = World(seed, faults=0.05 if seed % 2 else 0.0)
    world.run(60)
    world.check_outputs()
    assert world.copies.ends[CopyKind.LOAD, True] > 0


def test_what_the_pool_lost_comes_from_host_memory() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    key = world.ask(0)
    world.settle()
    world.check_outputs()
    assert world.cached[key] == 24  # of 25 + 1 to 6 tokens, whole blocks
    assert world.scheduler.snapshot().counters["kv_tier_hit_tokens_total{tier=host}"] == 24


def test_another_worker_finds_the_files_of_one_that_is_gone() -> None:
    first = World(0)
    first.ask(0, num_new=20)
    first.settle()
    second = World(0, files=first.files)
    second.histories = first.histories
    second.inbox.append(FilesListed(names=frozenset(first.files)))
    key = second.ask(0)
    second.settle()
    second.check_outputs()
    assert second.cached[key] == 24
    assert second.scheduler.snapshot().counters["kv_tier_hit_tokens_total{tier=disk}"] == 24


def test_a_load_that_hangs_is_given_up_and_computed() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    names = frozenset(world.files)
    world = World(0, files=world.files)
    world.inbox.append(FilesListed(names=names))
    key = world.ask(0, num_new=20)
    for _ in range(5):
        world.turn()
    assert not world.got[key]
    assert world.scheduler.next_deadline() < world.now + 1.0
    world.now += 1.0
    while world.turn():
        pass
    assert world.got[key] == world.wanted[key][1]
    assert world.cached[key] == 0
    counters = world.scheduler.snapshot().counters
    assert counters["kv_tier_refusals_total{tier=disk,reason=late}"] == 1
    world.settle()
    world.check_outputs()


def test_requests_with_one_prefix_load_it_once() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    history = list(world.histories[0])
    keys = []
    for _ in range(3):
        world.histories[0] = list(history)
        keys.append(world.ask(0))
    world.settle()
    world.check_outputs()
    assert world.copies.ends[CopyKind.LOAD, True] == 1
    assert [world.cached[key] for key in keys] == [24, 24, 24]


def test_computing_wins_over_a_slow_tier() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    world.lose_pool()
    rate = world.tiers.rates
    for tier in rate.values():
        tier.begin(-1, 1000, world.now)
        tier.end(-1, 1e6, world.now, ok=True)
    world.decode._inflight.model = QuickModel()
    key = world.ask(0)
    world.settle()
    world.check_outputs()
    assert world.cached[key] == 0
    counters = world.scheduler.snapshot().counters
    assert counters["kv_tier_refusals_total{tier=host,reason=cost}"] == 1


def test_kv_that_is_not_finite_is_in_no_tier() -> None:
    world = World(0)
    world.ask(0, num_new=20)
    world.settle()
    assert world.files
    names = list(world.tiers.slots._slots)
    world.tiers.forget(names)
    world.settle()
    assert not world.files
    assert not any(map(world.tiers.slots.knows, names))
