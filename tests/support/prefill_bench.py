"""A prefill scheduler with an engine whose tokens show every misuse of a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kv_transfer.control.listeners import TransferReport
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import SpanEvent, Submit, TokenEvent
from tests.support.scheduler_bench import BLOCK, SchedulerBench, request
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import (
    CommitHandoff,
    Delivered,
    EndHandoff,
    Granted,
    Push,
    Submitted,
)

PEER = WorkerRef(worker_id="d0", epoch=7, role=Role.DECODE, address="127.0.0.1:1")


def make_submit(name: str, prompt: list[int], *, max_tokens: int = 9, **more: Any) -> Submit:
    return request(name, prompt, peer=PEER, max_tokens=max_tokens, **more)


@dataclass
class Bench(SchedulerBench):
    """A scheduler with its engine; pushed blocks are copied out once their step is over, as a
    sender would."""

    config: WorkerConfig = field(
        default_factory=lambda: WorkerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    )

    def __post_init__(self) -> None:
        self.build(PrefillScheduler)
        self.tokens: list[TokenEvent] = []
        self.spans: list[SpanEvent] = []
        self.arrived: dict[tuple[RequestKey, int], dict[int, list[int]]] = {}  # by KV group
        self.commits: list[CommitHandoff] = []
        self.ends: list[EndHandoff] = []
        self.pushes: list[Push] = []
        self.waiting: list[Push] = []

    def take(self, out: Any) -> None:
        for step in out.events.values():
            self.tokens += step.tokens
            self.spans += step.spans
        for handoff in out.sends:
            match handoff:
                case Push():
                    assert handoff.key not in {end.key for end in self.ends}
                    self.pushes.append(handoff)
                    self.waiting.append(handoff)
                case CommitHandoff():
                    self.commits.append(handoff)
                case EndHandoff():
                    self.ends.append(handoff)
        while self.waiting and self.waiting[0].after <= self.executor.num_over:
            self.copy(self.waiting.pop(0))

    def copy(self, push: Push) -> None:
        store = self.arrived.setdefault((push.key, push.group), {})
        for index, block in enumerate(push.block_ids, push.first_block):
            assert index not in store, "a block was pushed twice"
            store[index] = list(self.engine.slots[block])

    def submit(self, submit: Submit, *, cached: int = 0, grant: bool = True) -> RequestKey:
        self.tell(Submitted(submit=submit))
        if grant:
            self.grant(submit, cached)
        return submit.key

    def grant(self, submit: Submit, cached: int = 0) -> None:
        self.tell(Granted(key=submit.key, num_cached_tokens=BLOCK * cached, num_tokens=0))

    def deliver(self, key: RequestKey) -> None:
        report = TransferReport(num_bytes=640, num_pieces=2, start=1.0, end=2.0)
        self.tell(Delivered(key=key, report=report))

    def pushed_tokens(self, key: RequestKey, length: int, group: int = 0) -> list[int]:
        store = self.arrived[key, group]
        flat = [token for index in sorted(store) for token in store[index]]
        return flat[:length]
