"""A scheduler with an engine whose tokens show every misuse of a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.batch import StepBatch, StepResult
from protocol.ids import RequestKey, WorkerRef
from protocol.kv_layout import ONE_GROUP, KVGroup
from protocol.messages import FailEvent, ScoreEvent, Submit
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.invariants import check_scheduler
from tests.support.paged import LateSteps, PagedTokens
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import StepOutput

BLOCK = 4


def request(
    name: str,
    prompt: list[int],
    *,
    peer: WorkerRef | None,
    max_tokens: int,
    seed: int = 0,
    time_left_s: float = 1e9,
    output: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    attempt: int = 0,
    router: str = "r",
) -> Submit:
    return Submit(
        key=RequestKey(name, attempt),
        router_id=router,
        prompt_ids=tuple(prompt),
        output_ids=output,
        sampling=SamplingParams(
            seed=seed, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop
        ),
        time_left_s=time_left_s,
        peer=peer,
    )


def not_finite_at(bench: SchedulerBench, key: RequestKey, position: int) -> None:
    """Have the engine report steps of a request as not finite from `position` on: NaN spreads to
    all later positions."""
    run = bench.engine.run

    def checked(batch: StepBatch) -> StepResult:
        result = run(batch)
        entry = bench.scheduler._entries.get(key)
        blocks = entry.sequence.tables.ids[0][:1] if entry else [None]
        return replace(
            result,
            non_finite=frozenset(
                index
                for index, step in enumerate(batch.sequences)
                if step.block_tables[0][0] in blocks and step.start + len(step.tokens) > position
            ),
        )

    bench.executor._run = checked


@dataclass
class SchedulerBench:
    """The common part of both schedulers' benches."""

    num_blocks: int = 64
    config: WorkerConfig = field(
        default_factory=lambda: WorkerConfig(
            max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0
        )
    )
    now: float = 100.0
    depth: int = 1
    groups: tuple[KVGroup, ...] = ONE_GROUP

    def build(self, scheduler: Any) -> None:
        self.blocks = WatchedBlocks(self.num_blocks, BLOCK, self.groups)
        self.engine = PagedTokens(self.num_blocks, BLOCK, self.groups)
        self.executor = LateSteps(self.engine.run, self.depth)
        self.scheduler = scheduler(
            config=self.config, blocks=self.blocks, fingerprint=FINGERPRINT, place="here"
        )
        self.planned: list[StepBatch] = []
        self.prompts: dict[RequestKey, int] = {}
        self.failures: list[FailEvent] = []
        self.scores: list[ScoreEvent] = []

    def tell(self, command: object) -> None:
        self.scheduler.handle(command, self.now)
        self.collect()

    def turn(self) -> bool:
        self.now += 1.0
        batch = self.scheduler.plan(self.now)
        if batch is not None:
            self.blocks.check_writes(batch)
            assert batch.num_tokens <= self.config.max_num_batched_tokens
            assert len(batch.sequences) <= self.config.max_num_seqs
            number = self.executor.launch(batch).number
            if self.executor.lands_early:
                self.land()
            self.scheduler.launched(number)
            self.planned.append(batch)
        self.collect()
        self.check()
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.depth):
            self.land()
        self.collect()
        self.check()
        return busy

    def land(self) -> None:
        """Apply the oldest step."""
        result = self.executor.wait()
        self.collect()
        self.scheduler.apply(result, self.now)
        self.collect()

    def collect(self) -> None:
        """Take the output in."""
        out, self.scheduler.output = self.scheduler.output, StepOutput()
        for step in out.events.values():
            self.failures += step.failures
            self.scores += step.scores
            self.prompts |= {event.key: event.num_cached_tokens for event in step.prompts}
        self.take(out)

    def take(self, out: Any) -> None:
        """Take what only one kind of scheduler puts out."""

    def owners(self) -> Iterable[Any]:
        """Entries that hold blocks."""
        return self.scheduler._entries.values()

    def check(self) -> None:
        """The held blocks are exactly those of sequences and of steps in flight."""
        check_scheduler(self.scheduler)
        owned = {block for entry in self.owners() for block in entry.sequence.tables.blocks()}
        assert self.blocks.held == owned | self.executor.blocks()
