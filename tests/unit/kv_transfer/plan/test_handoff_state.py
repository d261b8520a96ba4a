"""The pure state machine of one hand-off, message by message."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from concurrency.bounded_map import BoundedMap
from kv_transfer.config import ChecksumKind, TransferConfig
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.endpoint import Attempts
from kv_transfer.control.incoming import Incoming
from kv_transfer.plan.block_grants import BlockGrants
from kv_transfer.plan.checksum import content_checksum
from kv_transfer.plan.coverage import Area, Coverage
from kv_transfer.plan.handoff_state import (
    InboundHandoff,
    OutboundHandoff,
    PiecesLost,
    Verdict,
)
from kv_transfer.plan.states import GrantState
from protocol import codec
from protocol.errors import HandoffFailed, Internal, StaleMessage
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Commit, Grant, Piece, Ticket
from protocol.states import TransferState
from tests.support.transfer import SECRET, make_fingerprint, make_layout
from tests.support.transfer_net import SimLoop

KEY = RequestKey("r")
LAYOUT = make_layout(1)
PREFILL = WorkerRef(worker_id="p", epoch=1, role=Role.PREFILL, address="p:1")
DECODE = WorkerRef(worker_id="d", epoch=2, role=Role.DECODE, address="d:1")
TICKET = Ticket(key=KEY, sender_epoch=1, receiver_epoch=2, num_blocks=4, lifetime_s=100.0).signed(
    SECRET
)


def inbound(kind=InboundHandoff, cached=1):
    handoff = kind(key=KEY, ticket=TICKET, peer=PREFILL, deadline=100.0)
    handoff.reserve(
        generation=5,
        block_tables=((10, 11, 12, 13),),
        num_cached=cached,
        num_tokens=16,
        layout=LAYOUT,
    )
    return handoff


def piece(index, first_cell, num_cells, *, incarnation=1, first_layer=0, num_layers=2, **changes):
    fields = {"ticket": TICKET, "generation": 5, **changes}
    return Piece(
        key=KEY,
        index=index,
        first_cell=first_cell,
        num_cells=num_cells,
        first_layer=first_layer,
        num_layers=num_layers,
        prefill=PREFILL,
        prefill_layout=LAYOUT,
        incarnation=incarnation,
        **fields,
    )


def commit(num_pieces=2, **changes):
    fields = {"ticket": TICKET, "generation": 5, "num_blocks": 3, "checksum": 30, **changes}
    return Commit(key=KEY, tokens=(9,), num_pieces=num_pieces, **fields)


@pytest.mark.parametrize("arrives", [True, False])
def test_what_arrives_at_the_very_end_of_a_wait_has_arrived(arrives):
    loop, handoff = SimLoop(), inbound(Incoming)
    handoff.announce(piece(0, 1, 3))
    waiting = loop.run(handoff.settle(5.0))

    def arrive():
        handoff.arrived(0, 1, checksum=30)
        handoff.changed.set()

    loop.now += 5.0
    if arrives:
        loop.call_soon(arrive)
    loop.settle()
    loop.close()
    error = waiting.exception()
    assert (type(error) if error else None) is (None if arrives else HandoffFailed)


def test_a_whole_inbound_handoff():
    handoff = inbound()
    assert handoff.writable == (11, 12, 13)
    assert handoff.announce(piece(0, 1, 2)) is Verdict.NEW
    assert handoff.announce(piece(0, 1, 2)) is Verdict.REPEAT
    assert handoff.state is TransferState.MOVING
    assert handoff.announce(piece(1, 3, 1)) is Verdict.NEW
    assert not handoff.is_settled
    handoff.arrived(1, 1, checksum=20)
    handoff.arrived(0, 1, checksum=10)
    assert handoff.is_settled
    assert handoff.commit(commit()) is Verdict.NEW
    assert handoff.commit(commit()) is Verdict.REPEAT
    with pytest.raises(StaleMessage):
        handoff.commit(replace(commit(), tokens=(8,)))
    with pytest.raises(StaleMessage):
        handoff.announce(piece(2, 3, 1))


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (commit(num_pieces=3), "num_pieces"),
        (commit(num_blocks=4), "num_blocks"),
        (commit(checksum=31), "checksum"),
    ],
)
def test_a_commit_must_agree_with_what_arrived(bad, param):
    handoff = inbound()
    handoff.announce(piece(0, 1, 2))
    handoff.announce(piece(1, 3, 1))
    handoff.arrived(0, 1, checksum=10)
    handoff.arrived(1, 1, checksum=20)
    with pytest.raises(HandoffFailed) as caught:
        handoff.commit(bad)
    assert caught.value.param == param
    assert handoff.state is TransferState.MOVING


def test_a_commit_with_a_missing_piece_or_block_fails():
    handoff = inbound()
    handoff.announce(piece(0, 1, 2))
    handoff.arrived(0, 1, checksum=30)
    with pytest.raises(HandoffFailed, match="not all blocks"):
        handoff.commit(commit(num_pieces=1))
    handoff.announce(piece(1, 3, 1))
    with pytest.raises(HandoffFailed, match=r"pieces \[1\]"):
        handoff.commit(commit(num_pieces=1))


def test_a_fully_cached_prompt_commits_without_pieces():
    handoff = inbound(cached=4)
    assert handoff.commit(commit(num_pieces=0, num_blocks=0, checksum=0)) is Verdict.NEW


@pytest.mark.parametrize(
    "bad",
    [
        piece(0, 0, 1),  # cached
        piece(0, 3, 2),  # beyond the grant
        piece(0, -1, 1),
        piece(0, 1, 0),
        piece(0, 1, 1, first_layer=1, num_layers=2),
        piece(0, 1, 1, first_layer=-1, num_layers=1),
        piece(0, 1, 1, generation=4),
        piece(0, 1, 1, generation=0),
        piece(0, 1, 1, ticket=replace(TICKET, num_blocks=9)),
        piece(0, 1, 1, ticket=replace(TICKET, key=RequestKey("r", 1))),
    ],
)
def test_pieces_out_of_their_bounds_are_refused(bad):
    handoff = inbound()
    with pytest.raises(StaleMessage):
        handoff.announce(bad)
    assert handoff.is_settled


def test_layer_groups_must_not_overlap():
    handoff = inbound()
    handoff.announce(piece(0, 1, 3, first_layer=0, num_layers=1))
    with pytest.raises(StaleMessage, match="announced already"):
        handoff.announce(piece(1, 2, 1, first_layer=0, num_layers=2))
    assert handoff.announce(piece(1, 1, 3, first_layer=1, num_layers=1)) is Verdict.NEW


def test_a_lost_piece_comes_again_on_a_newer_link():
    handoff = inbound()
    handoff.announce(piece(0, 1, 3, incarnation=4))
    assert handoff.lost(0, 4)
    assert handoff.lost_pieces == [0]
    assert handoff.announce(piece(0, 1, 3, incarnation=4)) is Verdict.REPEAT
    assert handoff.announce(piece(0, 1, 3, incarnation=6)) is Verdict.NEW
    assert handoff.lost_pieces == []
    assert not handoff.lost(0, 4)  # the old link's failure is history
    handoff.arrived(0, 4, checksum=9)  # and so is its success
    assert not handoff.is_settled
    handoff.arrived(0, 6, checksum=30)
    with pytest.raises(StaleMessage, match="newer incarnation"):
        handoff.announce(piece(0, 1, 3, incarnation=4))
    with pytest.raises(StaleMessage, match="another one"):
        handoff.announce(piece(0, 1, 2, incarnation=7))
    assert handoff.commit(commit(num_pieces=1)) is Verdict.NEW


def test_a_written_piece_is_read_again_only_once_it_is_lost():
    """Its sender has one link, so the announcement names the incarnation that it had."""
    handoff, written = inbound(), piece(0, 1, 3, backend="cuda_ipc")
    assert handoff.announce(written) is Verdict.NEW
    assert handoff.announce(written) is Verdict.REPEAT  # it is being read
    assert handoff.lost(0, 1)
    assert handoff.announce(written) is Verdict.NEW
    handoff.arrived(0, 1, checksum=30)
    assert handoff.announce(written) is Verdict.REPEAT
    assert handoff.commit(commit(num_pieces=1)) is Verdict.NEW


def test_a_late_copy_of_a_commit_that_was_refused_proves_nothing():
    handoff = inbound()
    handoff.announce(piece(0, 1, 3))
    handoff.check_new(commit())
    assert handoff.lost(0, 1)
    handoff.num_refused = 1
    with pytest.raises(PiecesLost) as caught:
        handoff.check_new(commit())
    assert caught.value.info() == PiecesLost([0]).info()
    handoff.announce(piece(0, 1, 3, incarnation=2))
    with pytest.raises(StaleMessage, match=r"commit 0 of r.* was refused"):
        handoff.check_new(commit())
    handoff.check_new(commit(number=1))


@pytest.mark.parametrize("released", [True, False])
def test_ends_are_final_and_idempotent(released):
    handoff = inbound()
    handoff.announce(piece(0, 1, 3))
    assert handoff.end(released=released, error=None) is Verdict.NEW
    assert handoff.end(released=not released, error=None) is Verdict.REPEAT
    assert not handoff.lost(0, 1)
    for message in (piece(1, 1, 1), piece(0, 1, 3, incarnation=2)):
        with pytest.raises(StaleMessage):
            handoff.announce(message)
    with pytest.raises(StaleMessage):
        handoff.commit(commit())


@pytest.mark.parametrize("blocks", [(1, 2, 3, 4, 5), (1, 2)])
def test_a_reservation_keeps_to_the_ticket(blocks):
    handoff = InboundHandoff(key=KEY, ticket=TICKET, peer=PREFILL, deadline=100.0)

    def reserve(generation=1, num_cached=1, num_tokens=None):
        handoff.reserve(
            generation=generation,
            block_tables=(blocks,),
            num_cached=num_cached,
            num_tokens=num_tokens or 4 * len(blocks),
            layout=LAYOUT,
        )

    if len(blocks) > 4:
        with pytest.raises(StaleMessage, match="the ticket allows 4"):
            reserve()
        return
    for bad in ({"num_cached": 3}, {"num_cached": -1}, {"num_tokens": 9}, {"num_tokens": 4}):
        with pytest.raises(StaleMessage):
            reserve(**bad)
    with pytest.raises(StaleMessage, match="cached"):
        reserve(num_cached=2, num_tokens=7)  # the last block is not full: it cannot be cached
    reserve()
    with pytest.raises(StaleMessage):
        reserve(generation=2)


# --- prefill's side -------------------------------------------------------------------------------


def grant(**changes):
    fields = {
        "key": KEY,
        "ticket": TICKET,
        "decode": DECODE,
        "generation": 5,
        "block_tables": ((1, 2, 3, 4),),
        "num_cached_blocks": 1,
        "num_tokens": 16,
        "layout": LAYOUT,
        "fingerprint": make_fingerprint(LAYOUT),
        "links": (),
    }
    return Grant(**{**fields, **changes})


def outbound():
    return OutboundHandoff(key=KEY, ticket=TICKET, peer=DECODE, deadline=100.0)


def area(first_cell, num_cells, first_layer=0, num_layers=2):
    return Area(
        first_cell=first_cell,
        num_cells=num_cells,
        first_layer=first_layer,
        num_layers=num_layers,
    )


def test_a_whole_outbound_handoff():
    handoff = outbound()
    with pytest.raises(StaleMessage, match="no grant"):
        handoff.push(area(0, 1), max_cells=9)
    assert handoff.grant(grant(), 4) is Verdict.NEW
    assert handoff.grant(grant(), 4) is Verdict.REPEAT
    with pytest.raises(ValueError, match="before all"):
        handoff.committing((3,))
    assert handoff.push(area(0, 1), max_cells=9) == []  # cached
    assert handoff.state is TransferState.RESERVED
    assert handoff.push(area(0, 2), max_cells=9) == [(0, area(1, 1))]
    assert handoff.state is TransferState.MOVING
    assert handoff.push(area(2, 2), max_cells=1) == [(1, area(2, 1)), (2, area(3, 1))]
    with pytest.raises(StaleMessage):
        handoff.push(area(3, 1), max_cells=1)
    for sequence in (2, 0, 1):
        handoff.sent(sequence, num_bytes=4, checksum=10 + sequence)
    handoff.committing((3,))
    request = handoff.commit_request()
    assert (request.num_pieces, request.num_blocks, request.checksum) == (3, 3, 33)
    assert (request.tokens, request.generation, handoff.num_bytes) == ((3,), 5, 12)


@pytest.mark.parametrize(
    "bad",
    [
        grant(block_tables=((1, 2, 3, 4, 5),)),
        grant(block_tables=((1, 1, 2, 3),)),
        grant(block_tables=((1, 2, 3, LAYOUT.num_blocks),)),
        grant(block_tables=((-1, 2, 3, 4),)),
        grant(num_cached_blocks=5),
        grant(decode=replace(DECODE, epoch=3)),
        grant(ticket=replace(TICKET, num_blocks=9)),
    ],
)
def test_bad_grants_are_refused(bad):
    handoff = outbound()
    with pytest.raises(StaleMessage):
        handoff.grant(bad, 4)
    assert handoff.state is TransferState.OFFERED


def test_a_second_grant_is_refused():
    handoff = outbound()
    handoff.grant(grant(), 4)
    with pytest.raises(StaleMessage, match="granted before"):
        handoff.grant(grant(generation=6), 4)


# --- tickets, grants, records ---------------------------------------------------------------------


def context(me, *, secret=SECRET):
    return EndpointContext(
        ref=me,
        layout=LAYOUT,
        fingerprint=make_fingerprint(LAYOUT),
        secret=secret,
        ranks=None,
        clients=None,
        config=TransferConfig(),
    )


@pytest.mark.parametrize(
    ("ticket", "peer_epoch"),
    [
        (replace(TICKET, num_blocks=400), 1),  # altered
        (replace(TICKET, signature=b""), 1),
        (TICKET.signed(b"another secret"), 1),
        (TICKET, 3),  # another peer
        (replace(TICKET, receiver_epoch=4).signed(SECRET), 1),  # another incarnation
    ],
)
@pytest.mark.parametrize("genuine", [None, TICKET])
def test_bad_tickets_are_refused(ticket, peer_epoch, genuine):
    with pytest.raises(StaleMessage):
        context(DECODE).check_ticket(ticket, ticket.key, peer_epoch, sends=False, genuine=genuine)


def test_good_tickets_pass_on_both_sides():
    context(DECODE).check_ticket(TICKET, KEY, 1, sends=False)
    context(PREFILL).check_ticket(TICKET, KEY, 2, sends=True)


def test_only_the_very_ticket_that_was_checked_needs_no_second_look_at_its_signature():
    def check(ticket):
        context(DECODE, secret=b"other").check_ticket(ticket, KEY, 1, sends=False, genuine=TICKET)

    check(codec.decode(Ticket, codec.encode(TICKET)))
    for other in (replace(TICKET, lifetime_s=200.0), TICKET.signed(b"another secret")):
        with pytest.raises(StaleMessage, match="wrong signature"):
            check(other)


def test_a_message_names_no_handoff_that_holds_no_blocks():
    handoff = InboundHandoff(key=KEY, ticket=TICKET, peer=PREFILL, deadline=10.0)
    with pytest.raises(StaleMessage, match="generation"):
        handoff.check_current(TICKET, 0)


def test_a_block_is_in_one_grant_at_a_time():
    grants = BlockGrants()
    first = grants.grant((1, 2))
    with pytest.raises(Internal, match="block 2 is granted"):
        grants.grant((3, 2))
    with pytest.raises(Internal, match="twice"):
        grants.grant((3, 3))
    grants.quarantine(first)
    with pytest.raises(Internal, match="block 1 is quarantined"):
        grants.grant((1,))
    with pytest.raises(Internal, match="cannot become quarantined"):
        grants.quarantine(first)
    assert grants.num_blocks(GrantState.QUARANTINED) == 2
    assert grants.num_blocks(GrantState.GRANTED) == 0
    grants.close(first)
    assert grants.num_blocks(GrantState.QUARANTINED) == 0
    with pytest.raises(Internal, match="cannot become closed"):
        grants.close(first)
    assert grants.grant((1,)) > first
    assert grants.grant((3,)) > first  # a refused grant has kept nothing


def test_coverage_counts_layers_per_block():
    coverage = Coverage(num_cells=3, num_layers=4, unsent=[1], depths=[4])
    coverage.add(1, 2, 0, 3)
    assert not coverage.complete
    coverage.add(1, 1, 3, 1)
    coverage.add(2, 1, 3, 1)
    assert coverage.complete
    assert Coverage(num_cells=2, num_layers=4, unsent=[2], depths=[4]).complete


def test_old_attempts_are_refused_and_replaced():
    attempts = Attempts(10)
    assert attempts.admit(RequestKey("a", 0)) is None
    assert attempts.admit(RequestKey("a", 2)) == RequestKey("a", 0)
    assert attempts.admit(RequestKey("a", 2)) is None
    with pytest.raises(StaleMessage):
        attempts.admit(RequestKey("a", 1))
    assert attempts.admit(RequestKey("a", 2**62)) == RequestKey("a", 2)  # at once
    attempts.admit(RequestKey("b", 1))


def test_memory_is_bounded():
    records: BoundedMap[RequestKey, int] = BoundedMap(2)
    for attempt in range(3):
        records.put(RequestKey("a", attempt), attempt)
    assert len(records) == 2
    assert records.get(RequestKey("a", 0)) is None
    assert records.pop(RequestKey("a", 2)) == 2
    assert records.pop(RequestKey("a", 2)) is None


def test_only_a_crc_depends_on_the_place():
    data = torch.arange(9, dtype=torch.uint8)
    moved = {
        kind: content_checksum(data, kind, 1) == content_checksum(data, kind, 2)
        for kind in ChecksumKind
    }
    assert moved == {kind: kind is not ChecksumKind.CRC32 for kind in ChecksumKind}
