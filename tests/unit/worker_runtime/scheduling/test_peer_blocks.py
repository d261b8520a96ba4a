"""Loans of KV whose lender has less than was asked for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.kv.allocator import BlockAllocator
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import PrefixSource, Ticket
from tests.support.blocks import FINGERPRINT
from tests.support.invariants import check_blocks
from tests.support.submits import make_submit
from worker_runtime.scheduling.messages import Committed, Lent
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
