"""Which workers a choice looks at, of thousands."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import CacheChange, split_hints
from router.config import RouterConfig
from router.workers.bookkeeping import PrefixView, PromptBlocks
from router.workers.holders import Holders, marks
from router.workers.worker_set import MAX_CANDIDATES, WorkerSet
from worker_runtime.worker import _nearest

TOLD = random.Random(7).randbytes(8 * 400)
BLOCKS = split_hints(TOLD)
PROMPT = PromptBlocks(range(6400))


class Client:
    def __init__(self, number: int, workers: WorkerSet, role: Role) -> None:
        self.ref = SimpleNamespace(role=role, worker_id=f"{role}-{number}")
        self.role = role
        self.ready = self.connected = True
        self.prefix = PrefixView(partial(workers._holders.note, self))  # type: ignore[arg-type]

    def marks_of(self, prompt: PromptBlocks) -> list[int]:
        assert prompt is PROMPT
        return marks(BLOCKS)

    def has(self, num_blocks: int) -> None:
        self.prefix.take(CacheChange(reset=True, added=TOLD[: 8 * num_blocks]))


def fleet(count: int, num_prefills: int = 0) -> tuple[WorkerSet, list[Any]]:
    config = RouterConfig(model_path="m")
    workers = WorkerSet(router_id="r", secret=b"s", config=config)
    clients: list[Any] = [Client(number, workers, Role.DECODE) for number in range(count)]
    clients += [Client(number, workers, Role.PREFILL) for number in range(num_prefills)]
    workers._clients = {(client.ref.worker_id, 1): client for client in clients}
    workers._group()
    return workers, clients


@pytest.mark.parametrize("count", [0, 1, MAX_CANDIDATES])
def test_a_few_are_all_looked_at(count: int) -> None:
    workers, clients = fleet(count)
    assert workers.candidates(PROMPT, random.Random(1)) == {
        Role.DECODE: clients,
        Role.PREFILL: [],
    }


def test_of_many_a_sample_and_those_that_hold_the_prompt() -> None:
    workers, clients = fleet(1000)
    for number, length in ((7, 350), (300, 250), (301, 250), (999, 150)):
        clients[number].has(length)
    seen: Counter[str] = Counter()
    for seed in range(200):
        found = workers.candidates(PROMPT, random.Random(seed))[Role.DECODE]
        assert MAX_CANDIDATES <= len(found) <= MAX_CANDIDATES + 4
        assert {clients[n] for n in (7, 300, 301, 999)} <= set(found)
        seen.update(client.ref.worker_id for client in found)
    assert len(seen) > 990


def test_of_many_that_hold_the_same_beginning_some_are_taken_at_random() -> None:
    workers, clients = fleet(1000)
    for client in clients:
        client.has(150)
    clients[5].prefix.expect(RequestKey("a"), BLOCKS)  # a request in flight
    found = workers.candidates(PROMPT, random.Random(1))[Role.DECODE]
    assert clients[5] in found
    assert len(found) <= MAX_CANDIDATES + 4


def test_a_holder_is_found_as_long_as_it_holds() -> None:
    """Held, expected, evicted, disconnected: the index knows the marks of what it has now."""
    workers, clients = fleet(1000)
    client, key = clients[5], RequestKey("a")
    first = BLOCKS.index(marks(BLOCKS)[0]) + 1

    def found() -> bool:
        samples = (workers.candidates(PROMPT, random.Random(n)) for n in range(20))
        return all(client in sample[Role.DECODE] for sample in samples)

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


@pytest.mark.parametrize("sizes", [(1000, 1000), (1000, 300), (200, 900), (70, 70), (900, 60)])
def test_of_many_each_works_with_few_and_all_work(sizes: tuple[int, int]) -> None:
    """Whatever pairs routers choose, no worker needs more links than it keeps, and the samples of
    both pools leave none out."""
    num_decodes, num_prefills = sizes
    workers, clients = fleet(num_decodes, num_prefills)
    partners: dict[str, set[str]] = {client.ref.worker_id: set() for client in clients}
    looks: Counter[str] = Counter()
    for seed in range(10 * max(sizes)):
        found = workers.candidates(PROMPT, random.Random(seed))
        names = {role: {c.ref.worker_id for c in sample} for role, sample in found.items()}
        assert min(map(len, names.values())) >= 2
        for role, other in ((Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)):
            looks.update(names[role])
            for name in names[role]:
                partners[name] |= names[other]
    assert max(map(len, partners.values())) <= 64
    for role, count in ((Role.DECODE, num_decodes), (Role.PREFILL, num_prefills)):
        own = [looks[c.ref.worker_id] for c in clients if c.role is role]
        mean = sum(own) / count
        assert mean / 3 < min(own) <= max(own) < 3 * mean


def test_all_routers_pair_the_same_workers() -> None:
    near = []
    for _ in range(2):
        workers, _clients = fleet(500, 500)
        found = workers.candidates(PROMPT, random.Random(3))
        near.append({role: [c.ref.worker_id for c in sample] for role, sample in found.items()})
    assert near[0] == near[1]


def test_a_worker_prepares_links_first_to_those_it_is_paired_with() -> None:
    refs = [
        WorkerRef(
            worker_id=f"{role}-{n}", epoch=n + 1000 * (role is Role.DECODE), role=role, address=""
        )
        for role in Role
        for n in range(500)
    ]
    workers, clients = fleet(500, 500)
    own = "prefill-123"
    paired = set[str]()
    for seed in range(3000):
        found = workers.candidates(PROMPT, random.Random(seed))
        if any(client.ref.worker_id == own for client in found[Role.PREFILL]):
            paired |= {client.ref.worker_id for client in found[Role.DECODE]}
    (ref,) = [ref for ref in refs if ref.worker_id == own]
    first = [decode.worker_id for decode in _nearest(ref, refs)[:64]]
    assert paired <= set(first)
    assert len(clients) == 1000


def test_workers_that_are_not_ready_are_no_candidates() -> None:
    workers, clients = fleet(1000)
    for client in clients[:-1]:
        client.has(400)
        client.ready = False
    workers._group()
    for seed in range(20):
        found = workers.candidates(PROMPT, random.Random(seed))[Role.DECODE]
        assert found == [clients[-1]]
    assert workers.leaving() == clients[:-1]
    for client in clients[1:-1]:
        client.connected = False
        workers._place(client)
    assert workers.leaving() == clients[:1]
    clients[0].ready = True
    workers._place(clients[0])
    assert workers.leaving() == []


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
