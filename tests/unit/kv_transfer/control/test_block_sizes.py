"""Workers whose blocks differ in size: whatever is cut, cached or half full, the tokens arrive."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from kv_transfer.config import ChecksumKind
from kv_transfer.plan.coverage import Area
from kv_transfer.plan.handoff_state import InboundHandoff, OutboundHandoff
from kv_transfer.plan.reshard import cell_size
from protocol.errors import StaleMessage
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import Cells
from protocol.messages import Grant, Piece, Ticket
from protocol.states import TransferState
from tests.support.memory_links import MemoryBackend, MemoryHub
from tests.support.one_sided import OneSidedBackend, OneSidedHub
from tests.support.transfer import (
    PATIENT,
    SECRET,
    Pair,
    differing_tokens,
    fill_row,
    make_fingerprint,
    make_layout,
    random_row,
)

KEY = RequestKey("a")
SIZES = [(32, 16), (16, 32), (16, 64), (64, 16), (24, 16), (16, 24), (3, 4)]
LAYERS = 2


def layouts(source_tp, dest_tp, source_size, dest_size, num_tokens, **changes):
    """Layouts of two workers with room for two sequences of so many tokens."""
    shape = {"num_layers": LAYERS, "num_kv_heads": 2, "head_dim": 4} | changes
    return tuple(
        make_layout(tp, block_size=size, num_blocks=2 * -(-num_tokens // size) + 2, **shape)
        for tp, size in ((source_tp, source_size), (dest_tp, dest_size))
    )


def scattered(layout, num_tokens):
    """Blocks for a sequence, neither in order nor one after another."""
    return tuple(reversed(range(1, layout.num_blocks, 2)))[: layout.blocks_for(num_tokens)]


async def check_handoff(
    backends, source, dest, *, num_tokens, num_cached=0, chunk=1, config=PATIENT
):
    """Hand `num_tokens` tokens over; every one is right, and no other block was touched."""
    row = random_row(source, num_tokens, seed=1)
    ids, peer_ids = scattered(source, num_tokens), scattered(dest, num_tokens)
    async with Pair(source=source, dest=dest, backends=backends, config=config) as pair:
        fill_row(pair.prefill.pools, source, ids, row)
        there = num_cached * dest.block_size
        fill_row(pair.decode.pools, dest, peer_ids, row[:, :, :, :there])
        before = [[layer.clone() for layer in pool.layers] for pool in pair.decode.pools]
        await pair.run(
            KEY, ids, peer_ids, num_cached=num_cached, chunk=chunk, num_tokens=num_tokens
        )
        assert [key for key, _ in pair.decode.events.commits] == [KEY]
        assert differing_tokens(pair.decode.pools, dest, peer_ids, row) == []
        others = [b for b in range(dest.num_blocks) if b not in peer_ids[num_cached:]]
        for pool, layers in zip(pair.decode.pools, before, strict=True):
            for layer, old in zip(pool.layers, layers, strict=True):
                assert (layer[others] == old[others]).all()
        size = cell_size(source.block_size, dest.block_size)
        moved = (-(-num_tokens // size) * size) - there
        copies = max(1, dest.tp_size // dest.num_kv_heads)
        _, report = pair.prefill.events.commits[0]
        assert report.num_bytes == copies * moved * source.token_bytes()
        assert pair.receiver.stats.num_bytes == report.num_bytes
        assert pair.sender.num_live == pair.receiver.num_live == 0


@pytest.mark.parametrize(("source_size", "dest_size"), SIZES)
@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
async def test_every_pair_of_sizes_and_degrees_moves_the_same_tokens(
    backends, source_tp, dest_tp, source_size, dest_size
):
    source, dest = layouts(source_tp, dest_tp, source_size, dest_size, 75)
    await check_handoff(backends, source, dest, num_tokens=75)


@pytest.mark.parametrize(("source_size", "dest_size"), SIZES)
@pytest.mark.parametrize("kind", [ChecksumKind.NONE, ChecksumKind.CRC32])
async def test_a_sender_that_writes_by_itself(source_size, dest_size, kind):
    hub = OneSidedHub()
    source, dest = layouts(2, 1, source_size, dest_size, 75)
    config = replace(PATIENT, checksum=kind)
    await check_handoff(
        lambda: OneSidedBackend(hub), source, dest, num_tokens=75, num_cached=1, config=config
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tp=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    num_tokens=st.integers(1, 40),
    cached=st.integers(0, 40),
    chunk=st.integers(1, 5),
    one_sided=st.booleans(),
    small=st.booleans(),
)
def test_any_sizes_degrees_lengths_and_caches(
    tp, sizes, num_tokens, cached, chunk, one_sided, small
):
    source, dest = layouts(*tp, *sizes, num_tokens)
    hub, pools = MemoryHub(), OneSidedHub()
    config = replace(PATIENT, max_piece_bytes=1, device_piece_bytes=700) if small else PATIENT
    asyncio.run(
        check_handoff(
            (lambda: OneSidedBackend(pools)) if one_sided else (lambda: MemoryBackend(hub)),
            source,
            dest,
            num_tokens=num_tokens,
            num_cached=min(cached, num_tokens // dest.block_size),
            chunk=chunk,
            config=config,
        )
    )


async def test_what_decode_has_of_a_block_is_not_sent_again(memory):
    """Prefill pushes whole blocks of its own; decode's cache ends inside one of them."""
    source, dest = layouts(1, 1, 64, 16, 140)
    await check_handoff(memory, source, dest, num_tokens=140, num_cached=5, chunk=3)


async def test_a_prompt_that_decode_has_whole_still_commits(memory):
    source, dest = layouts(1, 1, 64, 16, 96)
    await check_handoff(memory, source, dest, num_tokens=96, num_cached=6)


# --- the geometry ---------------------------------------------------------------------------------


@given(
    sizes=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    first=st.integers(0, 200),
    count=st.integers(1, 200),
)
def test_cells_name_the_same_tokens_on_both_sides(sizes, first, count):
    size = cell_size(*sizes)
    wanted = list(range(first * size, (first + count) * size))
    for block_size in sizes:
        blocks = tuple(range(1000, 1000 + (first + count) * size // block_size + 1))
        cells = Cells.within(blocks, block_size, size=size, first=first, count=count)
        assert cells.num_tokens == len(wanted)
        places = zip(*cells.places(block_size // size), strict=True)
        tokens = [
            (block - 1000) * block_size + number * size + token
            for block, number in places
            for token in range(size)
        ]
        assert tokens == wanted
        assert set(cells.blocks) == {1000 + token // block_size for token in wanted}


PREFILL = WorkerRef(worker_id="p", epoch=1, role=Role.PREFILL, address="p:1")
DECODE = WorkerRef(worker_id="d", epoch=2, role=Role.DECODE, address="d:1")
TICKET = Ticket(key=KEY, sender_epoch=1, receiver_epoch=2, num_blocks=9, lifetime_s=100.0).signed(
    SECRET
)


def granted(ticket, source, dest, *, num_tokens, num_cached=0):
    handoff = OutboundHandoff(key=KEY, ticket=ticket, peer=DECODE, deadline=100.0)
    grant = Grant(
        key=KEY,
        ticket=ticket,
        decode=DECODE,
        generation=5,
        block_tables=(tuple(range(dest.blocks_for(num_tokens))),),
        num_cached_blocks=num_cached,
        num_tokens=num_tokens,
        layout=dest,
        fingerprint=make_fingerprint(dest),
        links=(),
    )
    handoff.grant(grant, source.block_size)
    return handoff


def piece(index, first_cell, num_cells, layout):
    return Piece(
        key=KEY,
        ticket=TICKET,
        generation=5,
        index=index,
        first_cell=first_cell,
        num_cells=num_cells,
        first_layer=0,
        num_layers=LAYERS,
        prefill=PREFILL,
        prefill_layout=layout,
    )


def cut(handoff, first, count):
    area = Area(first_cell=first, num_cells=count, first_layer=0, num_layers=LAYERS)
    return [(part.first_cell, part.num_cells) for _, part in handoff.push(area, max_cells=1000)]


def test_only_the_last_block_may_reach_beyond_the_tokens():
    source, dest = layouts(1, 1, 32, 16, 40)
    handoff = granted(TICKET, source, dest, num_tokens=40)
    assert handoff.cell_size == 16
    assert cut(handoff, 2, 2) == [(2, 1)]  # tokens 32 .. 47 of the 40
    with pytest.raises(StaleMessage, match="not within"):
        cut(handoff, 4, 2)
    assert cut(handoff, 0, 2) == [(0, 2)]
    handoff.committing((7,))


def test_a_piece_in_other_cells_than_the_first_is_refused():
    source, dest = layouts(1, 1, 32, 16, 40)
    handoff = InboundHandoff(key=KEY, ticket=TICKET, peer=PREFILL, deadline=100.0)
    handoff.reserve(
        generation=5, block_tables=((3, 4, 5),), num_cached=0, num_tokens=40, layout=dest
    )
    handoff.announce(piece(0, 0, 1, source))
    with pytest.raises(StaleMessage) as caught:
        handoff.announce(piece(1, 1, 1, structs.replace(source, block_size=8)))
    assert caught.value.param == "block_size"
    assert handoff.state is TransferState.MOVING
