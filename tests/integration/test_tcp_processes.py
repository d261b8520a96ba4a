"""Hand-offs over TCP between real processes, and what kills and freezes of either side do."""

from __future__ import annotations

import itertools

import pytest

from kv_transfer.config import TransferConfig
from protocol.errors import ErrorCode
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Ticket
from tests.support.transfer import SECRET
from tests.support.transfer_process import HASTY, PATIENT, Process

SOURCE, DEST = (3, 1, 4, 9, 5), (8, 2, 7, 1, 15)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def prefills():
    process = Process(Role.PREFILL)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def decodes():
    process = Process(Role.DECODE)
    yield process
    process.kill()


@pytest.fixture
def spawn():
    """Processes of one test; all are gone after it."""
    processes = []

    def make(role):
        processes.append(Process(role))
        return processes[-1]

    yield make
    for process in processes:
        process.kill()


class Worker:
    """One worker in a process."""

    def __init__(
        self, process: Process, tp_size: int = 1, config: TransferConfig = PATIENT, **shape: object
    ) -> None:
        self.process = process
        self.which, self.ref = process.do("make", tp_size, shape, config)

    def do(self, name, *args):
        return self.process.do(name, self.which, *args)

    def start(self, name, *args):
        return self.process.start(name, self.which, *args)


def begin(
    prefill: Worker,
    decode: Worker,
    *,
    source: tuple[int, ...] = SOURCE,
    dest: tuple[int, ...] = DEST,
    chunk: int = 2,
    ttl_s: float = 600.0,
):
    """Submit, grant and start sending; the key and the seed of its KV."""
    number = next(NUMBERS)
    key = RequestKey(f"r{number}")
    ticket = Ticket(
        key=key,
        sender_epoch=prefill.ref.epoch,
        receiver_epoch=decode.ref.epoch,
        num_blocks=len(dest),
        lifetime_s=ttl_s,
    ).signed(SECRET)
    decode.do("submit", key, ticket, prefill.ref)
    prefill.do("submit", key, ticket, decode.ref)
    decode.start("reserve", key, dest)
    prefill.do("send", key, source, number, chunk)
    return key, number


def assert_arrives(prefill: Worker, decode: Worker, **more) -> None:
    key, seed = begin(prefill, decode, **more)
    assert decode.do("over", key) == ("committed", None)
    assert prefill.do("over", key) == ("committed", None)
    assert decode.do("wrong", more.get("dest", DEST), seed) == []


def assert_nothing_left(*workers: Worker) -> None:
    for worker in workers:
        assert worker.do("left") == (0, 0)


@pytest.mark.parametrize("source_tp", [1, 2, 4])
@pytest.mark.parametrize("dest_tp", [1, 2, 4])
def test_every_pair_of_degrees(prefills, decodes, source_tp, dest_tp):
    prefill, decode = Worker(prefills, source_tp), Worker(decodes, dest_tp)
    assert_arrives(prefill, decode)
    assert_arrives(prefill, decode)
    assert_nothing_left(prefill, decode)


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 3), (3, 1)])
def test_three_heads_in_bfloat16(prefills, decodes, source_tp, dest_tp):
    shape = {"num_kv_heads": 3, "dtype": "bfloat16", "num_layers": 30, "head_dim": 64}
    assert_arrives(Worker(prefills, source_tp, **shape), Worker(decodes, dest_tp, **shape))


def test_sockets_and_threads_do_not_grow_with_handoffs(prefills, decodes):
    prefill, decode = Worker(prefills, 2), Worker(decodes, 2)
    assert_arrives(prefill, decode)
    before = [(p.do("sockets"), p.do("threads")) for p in (prefills, decodes)]
    for _ in range(20):
        assert_arrives(prefill, decode)
    after = [(p.do("sockets"), p.do("threads")) for p in (prefills, decodes)]
    for (sockets, threads), (sockets_after, threads_after) in zip(before, after, strict=True):
        assert sockets_after <= sockets + 2
        assert threads_after <= threads + 2


def assert_failed(worker: Worker, key: RequestKey) -> None:
    """Long before its lease would end it."""
    how, error = worker.do("over", key)
    assert how == "ended"
    assert error.code in (ErrorCode.HANDOFF_FAILED, ErrorCode.STALE_MESSAGE)


@pytest.mark.chaos
def test_a_killed_prefill_fails_its_handoffs_only(spawn, prefills, decodes):
    victims, decode = spawn(Role.PREFILL), Worker(decodes, 2)
    victim, healthy = Worker(victims, 2), Worker(prefills, 2)
    victim.do("hold")
    keys = [
        begin(victim, decode, dest=(2 * i, 2 * i + 1), source=(2 * i, 2 * i + 1))[0]
        for i in range(4)
    ]
    assert victim.do("caught")
    victims.kill()
    assert_arrives(healthy, decode, source=(1, 2), dest=(10, 11))
    for i, key in enumerate(keys):
        assert_failed(decode, key)
        assert decode.do("safe", key) == (2 * i, 2 * i + 1)
    assert_arrives(healthy, decode)
    assert_nothing_left(decode, healthy)


@pytest.mark.chaos
def test_a_killed_decode_fails_its_handoffs_only(spawn, prefills, decodes):
    victims, prefill = spawn(Role.DECODE), Worker(prefills, 2)
    victim, healthy = Worker(victims, 1), Worker(decodes, 4)
    prefill.do("hold")
    keys = [
        begin(prefill, victim, dest=(2 * i, 2 * i + 1), source=(2 * i, 2 * i + 1))[0]
        for i in range(3)
    ]
    assert prefill.do("caught")
    victims.kill()
    prefill.do("release")
    assert_arrives(prefill, healthy, source=(10, 11), dest=(1, 2))
    for key in keys:
        assert_failed(prefill, key)
    assert_arrives(prefill, healthy)
    assert_nothing_left(prefill, healthy)


@pytest.mark.chaos
def test_a_frozen_prefill_is_given_up_and_may_come_back(spawn, prefills, decodes):
    frozen, decode = spawn(Role.PREFILL), Worker(decodes, 2, HASTY)
    sleeper, healthy = Worker(frozen, 1, HASTY), Worker(prefills, 1, HASTY)
    assert_arrives(sleeper, decode)
    sleeper.do("hold")
    key, _ = begin(sleeper, decode)
    assert sleeper.do("caught")
    frozen.freeze()
    assert_arrives(healthy, decode, source=(1, 2), dest=(10, 11))  # others are not held up
    assert_failed(decode, key)
    assert decode.do("safe", key) == DEST
    assert_arrives(healthy, decode)  # into the very same blocks
    seed = next(NUMBERS) - 1
    frozen.thaw()
    sleeper.do("release")  # and sends pieces of an ended hand-off
    assert_failed(sleeper, key)
    assert decode.do("wrong", DEST, seed) == []
    assert_arrives(sleeper, decode)
    assert_nothing_left(decode, sleeper, healthy)


@pytest.mark.chaos
def test_a_frozen_decode_is_given_up_and_may_come_back(spawn, prefills, decodes):
    frozen, prefill = spawn(Role.DECODE), Worker(prefills, 2, HASTY)
    sleeper, healthy = Worker(frozen, 2, HASTY), Worker(decodes, 1, HASTY)
    assert_arrives(prefill, sleeper)
    prefill.do("hold")
    key, _ = begin(prefill, sleeper)
    assert prefill.do("caught")
    frozen.freeze()
    prefill.do("release")
    assert_arrives(prefill, healthy, source=(10, 11), dest=(1, 2))
    assert_failed(prefill, key)
    frozen.thaw()
    assert_failed(sleeper, key)
    assert sleeper.do("safe", key) == DEST
    assert_arrives(prefill, sleeper)
    assert_nothing_left(prefill, sleeper, healthy)


@pytest.mark.chaos
def test_a_restarted_decode_is_another_worker(spawn, prefills):
    """Its address may even be the same: the epoch in every message tells them apart."""
    first, prefill = spawn(Role.DECODE), Worker(prefills, 1)
    old = Worker(first, 1)
    assert_arrives(prefill, old)
    first.kill()
    second = Worker(spawn(Role.DECODE), 1)
    stale = WorkerRef(
        worker_id=old.ref.worker_id,
        epoch=old.ref.epoch,
        role=Role.DECODE,
        address=second.ref.address,
    )
    assert stale.epoch != second.ref.epoch
    assert_arrives(prefill, second)
    assert_nothing_left(prefill, second)
