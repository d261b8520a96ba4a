"""A decode scheduler with an engine whose tokens show every misuse of a block."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.commands import BlocksSafe, Committed, Output
from decode_worker.entry import State
from decode_worker.scheduler import DecodeScheduler
from engine.batch import StepBatch
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import FailEvent, ScoreEvent, Submit, TokenEvent
from protocol.sampling import SamplingParams
from tests.support.blocks import FINGERPRINT, WatchedBlocks
from tests.support.paged import LateSteps, PagedTokens, next_token
from worker_runtime.commands import Submitted
from worker_runtime.config import WorkerConfig

BLOCK = 4
PEER = WorkerRef(worker_id="p0", epoch=7, role=Role.PREFILL, address="127.0.0.1:1")


def make_submit(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 5,
    seed: int = 0,
    remote: bool = False,
    deadline: float = 1e9,
    output: tuple[int, ...] = (),
    attempt: int = 0,
    router: str = "r",
) -> Submit:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return Submit(
        key=RequestKey(name, attempt),
        router_id=router,
        prompt_ids=tuple(prompt),
        output_ids=output,
        sampling=sampling,
        deadline=deadline,
        peer=PEER if remote else None,
    )


@dataclass
class Bench:
    """A scheduler with its engine; `prefill` plays the other side of every hand-off."""

    num_blocks: int = 64
    config: WorkerConfig = field(
        default_factory=lambda: WorkerConfig(
            max_num_seqs=8, max_num_batched_tokens=8, watermark=0.0
        )
    )
    now: float = 100.0
    depth: int = 1

    def __post_init__(self) -> None:
        self.blocks = WatchedBlocks(self.num_blocks, BLOCK)
        self.engine = PagedTokens(self.num_blocks, BLOCK)
        self.executor = LateSteps(self.engine.run, self.depth)
        self.scheduler = DecodeScheduler(
            config=self.config, blocks=self.blocks, fingerprint=FINGERPRINT, place="d0"
        )
        self.planned: list[StepBatch] = []
        self.prompts: dict[RequestKey, int] = {}
        self.num_sent = 0
        self.tokens: dict[RequestKey, list[TokenEvent]] = {}
        self.failures: list[FailEvent] = []
        self.scores: list[ScoreEvent] = []
        self.out = Output()

    def tell(self, command: object) -> None:
        self.scheduler.handle(command, self.now, self.out)  # type: ignore[arg-type]
        self.collect()

    def turn(self) -> bool:
        self.now += 1.0
        batch = self.scheduler.plan(self.now, self.out)
        if batch is not None:
            self.blocks.check_writes(batch)
            assert batch.num_tokens <= self.config.max_num_batched_tokens
            assert len(batch.sequences) <= self.config.max_num_seqs
            self.executor.launch(batch)
            self.planned.append(batch)
        self.collect()
        self.check()
        busy = bool(self.executor.launched)
        if busy and (batch is None or len(self.executor.launched) == self.depth):
            self.scheduler.apply(self.executor.wait(), self.now, self.out)
        self.collect()
        self.check()
        return busy

    def check(self) -> None:
        """Held are the blocks of sequences that are here and those of steps in flight, no others;
        none of the latter is anywhere else."""
        self.blocks.check()
        here = (e for e in self.scheduler._entries.values() if e.state is not State.ENDING)
        owned = {block for entry in here for block in entry.sequence.block_ids}
        assert self.blocks.held == owned | self.executor.blocks()

    def collect(self) -> None:
        for step in self.out.events.values():
            for event in step.tokens:
                self.tokens.setdefault(event.key, []).append(event)
            self.failures.extend(step.failures)
            self.scores += step.scores
            self.prompts |= {event.key: event.num_cached_tokens for event in step.prompts}
        self.reserves = [*getattr(self, "reserves", []), *self.out.reserves]
        self.ends = [*getattr(self, "ends", []), *self.out.ends]
        self.out = Output()

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.turn() and not self.reserves:
                return
            self.serve_reserves()
        raise AssertionError("no end in sight")

    def serve_reserves(self) -> None:
        """Play prefill for every grant: write the prompt's KV into its blocks but for those that
        hold it, commit token 1."""
        reserves, self.reserves = self.reserves, []
        for reserve in reserves:
            submit = self.submits[reserve.key]
            context = [*submit.prompt_ids, *submit.output_ids]
            for position, token in enumerate(context):
                index, offset = divmod(position, BLOCK)
                slots = self.engine.slots[reserve.block_ids[index]]
                if index < reserve.num_cached_blocks:
                    assert slots[offset] == token
                else:
                    assert self.blocks.references(reserve.block_ids[index]) == 1
                    slots[offset] = token
                    self.num_sent += 1
            first = next_token(context, submit.sampling.seed)
            self.tell(Committed(key=reserve.key, first_token=first))

    def end_handoffs(self) -> None:
        """Play prefill for every hand-off that decode gives up: no write is in flight."""
        ends, self.ends = self.ends, []
        keys = {end.key for end in ends}
        self.reserves = [r for r in self.reserves if r.key not in keys]
        for key in keys:
            self.tell(BlocksSafe(key=key))

    submits: dict[RequestKey, Submit] = field(default_factory=dict)

    def submit(self, submit: Submit) -> RequestKey:
        self.submits[submit.key] = submit
        self.tell(Submitted(submit=submit))
        return submit.key

    def output(self, key: RequestKey) -> list[int]:
        return [event.token for event in self.tokens.get(key, [])]

    def idle(self) -> bool:
        return (
            self.blocks.num_available == self.num_blocks
            and self.scheduler.num_unfinished == 0
            and self.scheduler.load().running == self.scheduler.load().waiting == 0
        )
