"""Loans of KV whose lender has less than was asked for."""

from __future__ import annotations

from msgspec.structs import replace

from engine.kv.allocator import BlockAllocator
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import PrefixSource, Ticket
from tests.support.blocks import FINGERPRINT
from tests.support.invariants import check_blocks
from tests.support.submits import make_submit
from worker_runtime.scheduling.messages import Lent
from worker_runtime.scheduling.peer_blocks import PeerBlocks
from worker_runtime.scheduling.prefix_cache import PrefixCache, hash_blocks
from worker_runtime.scheduling.sequence import Sequence

LOAN = RequestKey("loan")


def test_a_short_loan_without_room_for_its_blocks_is_given_up() -> None:
    """Its first blocks were those of another sequence, whose KV has turned out to be unusable."""
    blocks = BlockAllocator(4, 4)
    cache = PrefixCache(blocks, fingerprint=FINGERPRINT, enabled=True)
    peers = PeerBlocks(cache, blocks, block_bytes=1)
    submit = make_submit(tuple(range(1, 18)))
    digests = hash_blocks(submit, FINGERPRINT, 4)

    def sequence(num_tokens: int) -> Sequence:
        part = replace(submit, prompt_ids=submit.prompt_ids[:num_tokens])
        tables = blocks.new_tables()
        return Sequence.from_submit(part, 0.0, digests=digests[: num_tokens // 4], tables=tables)

    other = sequence(8)
    assert cache.allocate(other, 8)
    other.resume_at(8)
    cache.publish(other, 8)
    borrower = sequence(17)
    lender = WorkerRef(worker_id="l", epoch=1, role=Role.PREFILL, address="")
    ticket = Ticket(key=LOAN, sender_epoch=1, receiver_epoch=2, num_blocks=4, lifetime_s=9.0)
    borrower.source = PrefixSource(worker=lender, ticket=ticket, num_tokens=16)
    assert peers.brings(borrower, lambda start, end: float(end - start), 0.0)
    assert (blocks.num_available, peers.output.borrows[0].reserve.num_cached_blocks) == (0, 2)

    cache.withdraw(other)
    assert peers.handle(Lent(key=LOAN, num_tokens=12), 0.0)
    assert [end.key for end in peers.output.ends] == [LOAN]
    assert peers.output.reserves == []
    assert peers.counters.read() == {"kv_tier_refusals_total{tier=peer,reason=full}": 1}
    assert (peers.num_active, borrower.source, blocks.num_free) == (0, None, 2)
    check_blocks(blocks)
