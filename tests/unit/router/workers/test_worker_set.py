"""Which workers a choice looks at, of thousands."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.ids import RequestKey, Role
from protocol.kv_layout import CacheChange, split_hints
from router.config import RouterConfig
from router.workers.bookkeeping import PrefixView, PromptBlocks
from router.workers.holders import Holders, marks
from router.workers.worker_set import MAX_CANDIDATES, WorkerSet

TOLD = random.Random(7).randbytes(8 * 400)
BLOCKS = split_hints(TOLD)
PROMPT = PromptBlocks(range(6400))


class Client:
    def __init__(self, number: int, workers: WorkerSet) -> None:
        self.ref = SimpleNamespace(role=Role.DECODE, worker_id=f"d{number}")
        self.role = Role.DECODE
        self.ready = True
        self.prefix = PrefixView(partial(workers._holders.note, self))  # type: ignore[arg-type]

    def marks_of(self, prompt: PromptBlocks) -> list[int]:
        assert prompt is PROMPT
        return marks(BLOCKS)

    def has(self, num_blocks: int) -> None:
        self.prefix.take(CacheChange(reset=True, added=TOLD[: 8 * num_blocks]))


def fleet(count: int) -> tuple[WorkerSet, list[Any]]:
    config = RouterConfig(model_path="m")
    workers = WorkerSet(router_id="r", secret=b"s", config=config)
    clients: list[Any] = [Client(number, workers) for number in range(count)]
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
    for number, length in ((7, 350), (300, 250), (301, 250), (999, 150)):
        clients[number].has(length)
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
        client.has(150)
    clients[5].prefix.expect(RequestKey("a"), BLOCKS)  # a request in flight
    found = workers.candidates(Role.DECODE, PROMPT, random.Random(1))
    assert clients[5] in found
    assert len(found) <= MAX_CANDIDATES + 4


def test_a_holder_is_found_as_long_as_it_holds() -> None:
    """Held, expected, evicted, disconnected: the index knows the marks of what it has now."""
    workers, clients = fleet(1000)
    client, key = clients[5], RequestKey("a")
    first = BLOCKS.index(marks(BLOCKS)[0]) + 1

    def found() -> bool:
        samples = (workers.candidates(Role.DECODE, PROMPT, random.Random(n)) for n in range(20))
        return all(client in sample for sample in samples)

    assert not found()
    client.has(first)
    assert found()
    client.prefix.expect(key, BLOCKS)
    client.prefix.take(CacheChange(removed=TOLD[: 8 * first]))
    assert found()  # the request brings more
    client.prefix.release(key)
    assert not found()
    client.has(400)
    client.prefix.forget()
    assert not found()
    assert len(workers._holders) == 0


def test_workers_that_are_not_ready_are_no_candidates() -> None:
    workers, clients = fleet(1000)
    for client in clients[:-1]:
        client.has(400)
        client.ready = False
    workers._group()
    for seed in range(20):
        found = workers.candidates(Role.DECODE, PROMPT, random.Random(seed))
        assert found == [clients[-1]]


def test_a_block_that_all_have_names_a_few_workers() -> None:
    holders: Holders[object] = Holders()
    all_of_them = [object() for _ in range(1000)]
    for owner in all_of_them * 2:
        holders.note(owner, 32, True)
    ((*owners,),) = holders.find([32, 64])
    assert len(set(owners)) == len(owners) == 32
    for owner in all_of_them:
        holders.note(owner, 32, False)
    assert len(holders) == 0
