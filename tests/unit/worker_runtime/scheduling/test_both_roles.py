"""Two schedulers that share an engine: whose step is next, and whose result has come."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from engine.batch import StepBatch, StepResult
from engine.kv.allocator import BlockAllocator
from kv_tiers.commands import CopyKind
from protocol.errors import ErrorInfo, Internal
from protocol.ids import Role
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import StepOutput

RESULT = StepResult(tokens=())


class Side:
    """A scheduler with so many steps to plan; notes what it is told."""

    def __init__(self, name: str, notes: list[tuple[str, Any]]) -> None:
        self.name, self.notes = name, notes
        self.todo = self.num_unfinished = 0
        self.output = StepOutput()
        self.shares_steps = False

    def plan(self, now: float) -> StepBatch | None:
        self.num_unfinished = self.todo
        self.todo = max(0, self.todo - 1)
        self.notes.append((self.name, "plan"))
        return StepBatch(sequences=()) if self.num_unfinished else None

    def launched(self, step: int) -> None:
        self.notes.append((self.name, step))

    def apply(self, result: StepResult, now: float) -> None:
        assert result is RESULT
        self.notes.append((self.name, "apply"))

    def passed(self, now: float) -> None:
        self.notes.append((self.name, "passed"))

    def remaining_s(self, now: float) -> float:
        return {"p": 3.0, "d": 5.0}[self.name]

    def next_deadline(self) -> float:
        return {"p": 7.0, "d": math.inf}[self.name]

    def fail_all(self, error: ErrorInfo) -> None:
        self.notes.append((self.name, error.message))

    admit = passed


def both(
    blocks: BlockAllocator, tiers: KVTiers | None = None
) -> tuple[BothRoles, Side, Side, list[tuple[str, Any]]]:
    notes: list[tuple[str, Any]] = []
    sides = Side("p", notes), Side("d", notes)
    schedulers = dict(zip((Role.PREFILL, Role.DECODE), sides, strict=True))
    return BothRoles(cast(Any, schedulers), blocks, Role.DECODE, tiers), *sides, notes


@pytest.mark.parametrize("depth", [1, 2])
def test_both_take_turns_while_they_have_work_and_get_their_own_results(depth: int) -> None:
    scheduler, prefill, decode, notes = both(BlockAllocator(4, 4))
    prefill.todo = prefill.num_unfinished = 3
    decode.todo = decode.num_unfinished = 6
    owners, results, number = "", "", 0
    assert scheduler.remaining_s(0.0) == 0.0
    while True:
        notes.clear()
        if scheduler.plan(0.0) is not None:
            number += 1
            owner = notes[-1][0]
            owners += owner
            scheduler.launched(number)
            assert notes[-1] == (owner, number)
            assert scheduler.remaining_s(0.0) == {"p": 3.0, "d": 5.0}[owner]
        if len(owners) == len(results):
            break
        if len(owners) - len(results) == depth or notes[-1][1] == "plan":
            notes.clear()
            scheduler.apply(RESULT, 0.0)
            (first, second) = notes
            assert (first[1], second[1]) == ("apply", "passed")
            assert {first[0], second[0]} == {"p", "d"}
            results += first[0]
    assert owners == results == "pdpdpdddd"[: len(owners)]
    assert len(owners) == 9
    assert scheduler.next_deadline() == 7.0
    scheduler.fail_all(Internal("broken").info())
    assert notes[-2:] == [("p", "broken"), ("d", "broken")]


def test_blocks_leak_when_nothing_has_them() -> None:
    blocks = BlockAllocator(9, 4)
    tiers = KVTiers(blocks, num_slots=4, slot_bytes=1, segment_blocks=0)
    scheduler, prefill, _, _ = both(blocks, tiers)
    assert scheduler.num_leaked_blocks() == 0
    held = blocks.allocate(3)
    assert held is not None
    prefill.num_unfinished = 1
    assert scheduler.num_leaked_blocks() == 0  # perhaps those of its request
    prefill.num_unfinished = 0
    assert scheduler.num_leaked_blocks() == 3
    copy = tiers.copies.start(CopyKind.STORE, slots=(0,), blocks=held[:1])
    blocks.free(held[:1])
    assert scheduler.num_leaked_blocks() == 2
    blocks.quarantine(held[1:2])
    assert scheduler.num_leaked_blocks() == 2
    tiers.copies.release(copy)
    blocks.unquarantine(held[1:2])
    blocks.free(held[2:])
    assert scheduler.num_leaked_blocks() == 0
