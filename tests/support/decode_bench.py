"""A decode scheduler with an engine whose tokens show every misuse of a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from decode_worker.lifecycle import DecodeEntry
from decode_worker.scheduler import DecodeScheduler
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Submit, TokenEvent
from tests.support.invariants import may_hold_blocks
from tests.support.paged import next_token
from tests.support.scheduler_bench import BLOCK, SchedulerBench, request
from worker_runtime.scheduling.messages import BlocksSafe, Committed, EndHandoff, Reserve, Submitted

PEER = WorkerRef(worker_id="p0", epoch=7, role=Role.PREFILL, address="127.0.0.1:1")


def make_submit(
    name: str, prompt: list[int], *, remote: bool = False, max_tokens: int = 5, **more: Any
) -> Submit:
    peer = PEER if remote else None
    return request(name, prompt, peer=peer, max_tokens=max_tokens, **more)


@dataclass
class Bench(SchedulerBench):
    """A scheduler with its engine; `prefill` plays the other side of every hand-off."""

    def __post_init__(self) -> None:
        self.build(DecodeScheduler)
        self.num_sent = 0
        self.tokens: dict[RequestKey, list[TokenEvent]] = {}
        self.reserves: list[Reserve] = []
        self.ends: list[EndHandoff] = []

    def take(self, out: Any) -> None:
        for step in out.events.values():
            for event in step.tokens:
                self.tokens.setdefault(event.key, []).append(event)
        self.reserves += out.reserves
        self.ends += out.ends

    def owners(self) -> Iterable[DecodeEntry]:
        return [e for e in super().owners() if may_hold_blocks(e)]

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.turn() and not self.reserves:
                return
            self.serve_reserves()
        raise AssertionError("no end in sight")

    def serve_reserves(self, *, held: int | None = None) -> None:
        """Act as prefill for every grant: write the prompt's KV into blocks that lack it, commit
        token 1. `held`: its router has not got that, nor that so many tokens were cached."""
        reserves, self.reserves = self.reserves, []
        for reserve in reserves:
            submit = self.submits[reserve.key]
            context = [*submit.prompt_ids, *submit.output_ids]
            for group, table in zip(self.groups, reserve.block_tables, strict=True):
                start = group.first_token(len(context))
                for position, token in enumerate(context[start:], start):
                    index, offset = divmod(position, BLOCK)
                    block = table[index - start // BLOCK]
                    slots = self.engine.slots[block]
                    if index < reserve.num_cached_blocks:
                        assert slots[offset] == token
                    else:
                        assert self.blocks.num_references(block) == 1
                        slots[offset] = token
                        self.num_sent += 1
            window = self.groups[0].window
            first = next_token(context[-window:] if window else context, submit.sampling.seed)
            self.tell(Committed(key=reserve.key, tokens=(first,), held=held))

    def end_handoffs(self) -> None:
        """Act as prefill for every hand-off that decode ends: no write is in flight."""
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
