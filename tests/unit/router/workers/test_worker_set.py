"""Which workers a choice looks at, of thousands."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.ids import Role
from router.config import RouterConfig
from router.workers.bookkeeping import PrefixView, PromptBlocks
from router.workers.worker_set import MAX_CANDIDATES, WorkerSet

BLOCKS = [b"%08d" % number for number in range(100)]
PROMPT = PromptBlocks(range(1600))


class Client:
    def __init__(self, number: int) -> None:
        self.ref = SimpleNamespace(role=Role.DECODE, worker_id=f"d{number}")
        self.role = Role.DECODE
        self.ready = True
        self.prefix = PrefixView()
        self.prefix.reports = True

    def blocks_of(self, prompt: PromptBlocks) -> list[bytes]:
        assert prompt is PROMPT
        return BLOCKS


def fleet(count: int) -> tuple[WorkerSet, list[Any]]:
    config = RouterConfig(model_path="m")
    workers = WorkerSet(router_id="r", secret=b"s", config=config)
    clients: list[Any] = [Client(number) for number in range(count)]
    workers._clients = {(client.ref.worker_id, 1): client for client in clients}
    workers._group()
    return workers, clients


@pytest.mark.parametrize("count", [0, 1, MAX_CANDIDATES])
def test_a_few_are_all_looked_at(count: int) -> None:
    workers, clients = fleet(count)
    assert workers.candidates(Role.DECODE, PROMPT, random.Random(1)) == clients
    assert workers.candidates(Role.PREFILL, PROMPT, random.Random(1)) == []


def test_of_many_a_sample_and_those_that_hold_the_prompt() -> None:
    workers, clients = fleet(1000)
    for number, length in ((7, 90), (300, 60), (301, 60), (999, 10)):
        clients[number].prefix._held.update(BLOCKS[:length])
    seen: Counter[str] = Counter()
    for seed in range(200):
        found = workers.candidates(Role.DECODE, PROMPT, random.Random(seed))
        assert MAX_CANDIDATES <= len(found) <= MAX_CANDIDATES + 4
        assert {clients[n] for n in (7, 300, 301, 999)} <= set(found)
        seen.update(client.ref.worker_id for client in found)
    assert len(seen) > 990


def test_of_many_that_hold_the_same_beginning_some_are_taken_at_random() -> None:
    workers, clients = fleet(1000)
    for client in clients:
        client.prefix._held.update(BLOCKS[:30])
    clients[5].prefix._expected.update(BLOCKS)  # by a request in flight
    found = workers.candidates(Role.DECODE, PROMPT, random.Random(1))
    assert clients[5] in found
    assert len(found) <= MAX_CANDIDATES + 4


def test_workers_that_are_not_ready_are_no_candidates() -> None:
    workers, clients = fleet(1000)
    for client in clients[:-1]:
        client.ready = False
    for seed in range(20):
        found = workers.candidates(Role.DECODE, PROMPT, random.Random(seed))
        assert found == [clients[-1]]
