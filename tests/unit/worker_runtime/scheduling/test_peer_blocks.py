"""Loans of KV whose lender has less than was asked for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.kv.allocator import BlockAllocator
from kv_transfer.control.listeners import TransferReport
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import PrefixSource, Ticket
from tests.support.blocks import FINGERPRINT
from tests.support.invariants import check_blocks
from tests.support.submits import make_submit
from worker_runtime.scheduling.messages import (
    BlocksSafe,
    CommitHandoff,
    Committed,
    Delivered,
    EndHandoff,
    Granted,
    HandoffEnded,
    Lend,
    Lent,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache, hash_blocks
from worker_runtime.scheduling.sequence import Sequence

LOAN = RequestKey("loan")


SUBMIT = make_submit(tuple(range(1, 18)))


class Borrower:
    """A pool with the first eight tokens of a prompt, and a loan of sixteen that was asked for."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockAllocator(num_blocks, 4)
        self.cache = PrefixCache(self.blocks, fingerprint=FINGERPRINT, enabled=True)
        self.peers = PeerBlocks(self.cache, self.blocks, block_bytes=1)
        self.other = self.sequence(8)
        assert self.cache.allocate(self.other, 8)
        self.other.resume_at(8)
        self.cache.publish(self.other, 8)
        self.borrower = self.sequence(17)
        lender = WorkerRef(worker_id="l", epoch=1, role=Role.PREFILL, address="")
        ticket = Ticket(key=LOAN, sender_epoch=1, receiver_epoch=2, num_blocks=4, lifetime_s=9.0)
        self.borrower.source = PrefixSource(worker=lender, ticket=ticket, num_tokens=16)
        assert self.peers.brings(self.borrower, lambda start, end: float(end - start), 0.0)
        assert self.peers.output.borrows[0].reserve.num_cached_blocks == 2

    def sequence(self, num_tokens: int) -> Sequence:
        part = replace(SUBMIT, prompt_ids=SUBMIT.prompt_ids[:num_tokens])
        digests = hash_blocks(SUBMIT, FINGERPRINT, 4)[: num_tokens // 4]
        return Sequence.from_submit(part, 0.0, digests=digests, tables=self.blocks.new_tables())


@pytest.mark.parametrize("lent", [16, 12])
def test_what_was_borrowed_is_found_by_the_sequence_and_held_by_no_one(lent: int) -> None:
    world = Borrower(9)
    blocks, peers = world.blocks, world.peers
    if lent < 16:  # granted anew
        assert peers.handle(Lent(key=LOAN, num_tokens=lent), 0.0)
        (reserve,) = peers.output.reserves
        assert (reserve.num_cached_blocks, reserve.num_tokens) == (2, lent)
    assert world.cache.num_cached(world.borrower) == 8
    assert peers.handle(Committed(key=LOAN, tokens=()), 0.5)
    assert world.cache.num_cached(world.borrower) == lent
    assert (peers.num_active, world.borrower.source) == (0, None)
    assert peers.counters.read()["kv_tier_hit_tokens_total{tier=peer}"] == lent - 8
    blocks.free(world.other.drop_kv())
    assert (blocks.num_held, blocks.num_cached) == (0, lent // 4)
    check_blocks(blocks)


def test_a_short_loan_without_room_for_its_blocks_is_given_up() -> None:
    """Its first blocks were those of another sequence, whose KV has turned out to be unusable."""
    world = Borrower(4)
    blocks, peers, borrower = world.blocks, world.peers, world.borrower
    assert blocks.num_available == 0
    world.cache.withdraw(world.other)
    assert peers.handle(Lent(key=LOAN, num_tokens=12), 0.0)
    assert [end.key for end in peers.output.ends] == [LOAN]
    assert peers.output.reserves == []
    assert peers.counters.read() == {"kv_tier_refusals_total{tier=peer,reason=full}": 1}
    assert (peers.num_active, borrower.source, blocks.num_free) == (0, None, 2)
    check_blocks(blocks)


def lender(num_cached: int) -> tuple[Borrower, tuple[bytes, ...]]:
    """A pool with so many cached tokens of the prompt, and the names of all that is asked for."""
    world = Borrower(9)
    world.blocks.free(world.other.drop_kv())
    assert world.peers.handle(HandoffEnded(key=LOAN, error=None), 0.0)
    assert world.peers.handle(BlocksSafe(key=LOAN), 0.0)
    assert world.peers.num_active == world.blocks.num_held == 0
    first = world.sequence(num_cached)
    assert world.cache.allocate(first, num_cached)
    first.resume_at(num_cached)
    world.cache.publish(first, num_cached)
    world.blocks.free(first.drop_kv())
    world.peers.output = StepOutput()
    return world, hash_blocks(SUBMIT, FINGERPRINT, 4)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("num_cached", [16, 12, 8, 4])
def test_what_is_lent_is_held_until_it_has_been_read_and_no_longer(
    num_cached: int, again: bool
) -> None:
    """The borrower has eight tokens and asks for sixteen: with fewer it grants anew, or ends it."""
    world, names = lender(max(8, num_cached))
    if num_cached < 8:  # it has lost the others since
        names = (*names[:1], *(bytes(32) for _ in names[1:]))
    peers, blocks = world.peers, world.blocks
    wanted = Granted(key=LOAN, num_cached_tokens=8, num_tokens=16)
    assert peers.handle(Lend(digests=names, granted=wanted), 0.0)
    assert blocks.num_held == num_cached // 4
    peers.offer()
    if again:
        assert peers.handle(Lend(digests=names, granted=wanted), 0.0)
        peers.offer()
    peers.offer()
    assert peers.output.lent == [Lent(key=LOAN, num_tokens=num_cached)] * (1 + again)
    if num_cached < 16:
        assert peers.output.sends == []
        end = max(8, num_cached)
        assert peers.handle(Granted(key=LOAN, num_cached_tokens=8, num_tokens=end), 0.0)
    *pushes, last = peers.output.sends
    if num_cached < 8:
        assert (pushes, last) == ([], EndHandoff(key=LOAN, released=True, error=None))
    else:
        lent = [block for push in pushes for block in push.block_ids]
        assert [push.first_block for push in pushes] == [2] * (num_cached > 8)
        assert lent == blocks.find(names[: num_cached // 4])[2:]
        assert last == CommitHandoff(key=LOAN, tokens=())
    assert blocks.num_held == num_cached // 4  # they are read
    report = TransferReport(num_bytes=1, num_pieces=1, start=0.0, end=1.0)
    over = Delivered(key=LOAN, report=report) if again else HandoffEnded(key=LOAN, error=None)
    assert peers.handle(over, 0.0)
    assert (peers.num_active, blocks.num_held) == (0, 0)
    check_blocks(blocks)


def test_what_is_not_here_is_not_lent() -> None:
    world, names = lender(8)
    peers = world.peers
    wanted = Granted(key=LOAN, num_cached_tokens=8, num_tokens=16)
    assert peers.handle(Lend(digests=names[::-1], granted=wanted), 0.0)
    assert peers.output.lent == [Lent(key=LOAN, num_tokens=0)]
    assert (peers.num_active, world.blocks.num_held) == (0, 0)
