"""Whole hand-offs over every backend: the contract suite."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from kv_transfer.config import ChecksumKind
from protocol.errors import ErrorCode, HandoffFailed
from protocol.ids import RequestKey
from protocol.messages import Ack, CommitNotice
from tests.support.circles import circles
from tests.support.transfer import (
    PATIENT,
    SECRET,
    Pair,
    differing,
    fill,
    make_fingerprint,
    make_layout,
    random_kv,
)
from tests.support.transfer_steps import DEST, KEY, LAYOUT, OTHER, SOURCE, finish, ready

SIZES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]


async def moved(backends, source, dest, config=PATIENT):
    """Hand five blocks over; what prefill was told."""
    kv = random_kv(source, 5, seed=1)
    async with Pair(source=source, dest=dest, backends=backends, config=config) as pair:
        fill(pair.prefill.pools, source, SOURCE, kv)
        await pair.run(KEY, SOURCE, DEST)
        assert differing(pair.decode.pools, dest, DEST, kv) == []
        assert pair.sender.num_live == pair.receiver.num_live == 0
        assert pair.sender.stats.committed == pair.receiver.stats.committed == 1
        for plane in (*pair.prefill.planes, *pair.decode.planes):
            assert plane._accesses == {}
        return pair.prefill.events.commits[0][1]


@pytest.mark.parametrize(("source_tp", "dest_tp"), SIZES)
async def test_every_pair_of_degrees_moves_the_same_bits(backends, source_tp, dest_tp):
    source = make_layout(source_tp)
    report = await moved(backends, source, make_layout(dest_tp))
    assert report.num_pieces == 3
    assert report.num_bytes == 5 * source.token_bytes() * source.block_size
    assert report.start < report.end


async def test_a_hand_off_leaves_no_circles_to_the_garbage_collector(any_backends):
    """Each of its looks stops the event loop, and how often it looks such circles decide."""
    layout = make_layout(2)
    async with Pair(source=layout, dest=layout, backends=any_backends) as pair:
        await pair.run(KEY, SOURCE, DEST)
        with circles() as names:
            await pair.run(OTHER, SOURCE, DEST)
        assert {name for name in names if name.startswith(("kv_transfer", "concurrent"))} == set()


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_three_heads(backends, source_tp, dest_tp, dtype):
    source = make_layout(source_tp, num_kv_heads=3, dtype=dtype)
    await moved(backends, source, make_layout(dest_tp, num_kv_heads=3, dtype=dtype))


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(4, 1), (1, 4), (4, 4), (8, 2), (2, 8)])
async def test_replicated_heads_go_once_to_each_destination(memory, source_tp, dest_tp):
    source, dest = (make_layout(tp, num_kv_heads=2) for tp in (source_tp, dest_tp))
    report = await moved(memory, source, dest)
    copies = max(dest_tp // 2, 1)
    assert report.num_bytes == copies * 5 * source.token_bytes() * source.block_size


@pytest.mark.parametrize("num_cached", [0, 1, 4, 5])
@pytest.mark.parametrize("chunk", [1, 2, 5])
async def test_cached_blocks_are_neither_sent_nor_touched(any_backends, num_cached, chunk):
    layout = make_layout(2)
    kv, other = random_kv(layout, 5, seed=1), random_kv(layout, 5, seed=2)
    async with Pair(source=layout, dest=layout, backends=any_backends) as pair:
        fill(pair.prefill.pools, layout, SOURCE, kv)
        fill(pair.decode.pools, layout, DEST, other)
        await pair.run(KEY, SOURCE, DEST, num_cached=num_cached, chunk=chunk)
        cached, fresh = DEST[:num_cached], DEST[num_cached:]
        assert differing(pair.decode.pools, layout, cached, other[:, :num_cached]) == []
        assert differing(pair.decode.pools, layout, fresh, kv[:, num_cached:]) == []
        _, commit = pair.decode.events.commits[0]
        assert commit.num_blocks == 5 - num_cached
        assert (commit.num_pieces == 0) == (num_cached == 5)


async def test_large_pushes_are_split_and_joined(any_backends):
    layout = make_layout(1, num_layers=5)
    kv = random_kv(layout, 5, seed=1)
    size = 2 * 5 * 4 * 2 * 4 * 8 * 4  # two blocks
    config = replace(PATIENT, max_piece_bytes=size, device_piece_bytes=size)
    async with Pair(source=layout, dest=layout, backends=any_backends, config=config) as pair:
        fill(pair.prefill.pools, layout, SOURCE, kv)
        pair.submit(KEY, 5)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        pair.sender.push(KEY, SOURCE, 0)
        pair.sender.commit(KEY, (1,))
        await pair.decode.events.wait(lambda e: e.is_over(KEY))
        assert differing(pair.decode.pools, layout, DEST, kv) == []
        assert pair.decode.events.commits[0][1].num_pieces == 3


@pytest.mark.parametrize("kind", list(ChecksumKind))
async def test_checksum_kinds(memory, kind):
    layout = make_layout(2, dtype="bfloat16")
    await moved(memory, layout, layout, replace(PATIENT, checksum=kind))


async def test_many_handoffs_at_once_share_the_links(backends):
    source = make_layout(2, num_blocks=256, num_layers=3)
    dest = make_layout(4, num_blocks=256, num_layers=3)
    keys = [RequestKey(f"r{i}") for i in range(48)]
    async with Pair(source=source, dest=dest, backends=backends) as pair:
        blocks = {key: tuple(range(2 * i, 2 * i + 2)) for i, key in enumerate(keys)}
        landing = {key: tuple(255 - b for b in ids) for key, ids in blocks.items()}
        kv = {key: random_kv(source, 2, seed=i) for i, key in enumerate(keys)}
        for key in keys:
            fill(pair.prefill.pools, source, blocks[key], kv[key])
        await asyncio.gather(*(pair.run(key, blocks[key], landing[key], chunk=1) for key in keys))
        assert len(pair.decode.events.commits) == len(pair.prefill.events.commits) == 48
        for key in keys:
            assert differing(pair.decode.pools, dest, landing[key], kv[key]) == []
        assert pair.sender.stats.relinked == 0


async def across(one, other, key):
    """Hand over from the prefill side of one pair to the decode side of another."""
    ticket = structs.replace(other.ticket(key, 5), sender_epoch=one.prefill.ref.epoch).signed(
        SECRET
    )
    other.receiver.offer(key, ticket, one.prefill.ref)
    one.sender.expect(key, ticket, other.decode.ref)
    await other.receiver.reserve(key, (DEST,), 0)
    one.sender.push(key, SOURCE, 0)
    one.sender.commit(key, (1,))


async def test_a_receiver_that_starts_anew_gets_links_of_its_own(backends):
    """A decode worker dies and comes back under another epoch; prefill keeps working."""
    layout = make_layout(2)
    kv = random_kv(layout, 5, seed=1)
    async with Pair(source=layout, dest=layout, backends=backends) as old:
        fill(old.prefill.pools, layout, SOURCE, kv)
        await old.run(KEY, SOURCE, DEST)
        for plane in old.decode.planes:
            plane.close()
        old.clients.handlers.pop(old.decode.ref.address)
        async with Pair(
            source=layout, dest=layout, backends=backends, clients=old.clients, epochs=(12, 23)
        ) as new:
            key = RequestKey("b")
            await across(old, new, key)
            await new.decode.events.wait(lambda e: e.is_over(key))
            assert differing(new.decode.pools, layout, DEST, kv) == []
            await old.sender.peer_lost(old.decode.ref.epoch)


async def test_idle_links_beyond_the_limit_are_closed_and_made_again(backends):
    layout = make_layout(1)
    kv = random_kv(layout, 5, seed=1)
    config = replace(PATIENT, max_peers=1)
    async with Pair(source=layout, dest=layout, backends=backends, config=config) as one:
        fill(one.prefill.pools, layout, SOURCE, kv)
        async with Pair(
            source=layout,
            dest=layout,
            backends=backends,
            config=config,
            clients=one.clients,
            epochs=(12, 23),
        ) as two:
            for turn in range(4):
                target = (one, two)[turn % 2]
                key = RequestKey(f"r{turn}")
                await across(one, target, key)
                await target.decode.events.wait(lambda e, key=key: e.is_over(key))
                await one.prefill.events.wait(lambda e, key=key: e.is_over(key))
                assert differing(target.decode.pools, layout, DEST, kv) == []
            assert sum(len(plane._links) for plane in one.prefill.planes) == 1


async def test_a_receiver_closes_idle_links_beyond_the_limit_too(backends):
    layout = make_layout(1)
    kv = random_kv(layout, 5, seed=1)
    common = {"source": layout, "dest": layout, "backends": backends}
    config = replace(PATIENT, max_peers=1)
    async with Pair(**common, config=config) as one:
        others = {"clients": one.clients, "epochs": (12, 23)}
        async with Pair(**common, **others) as two:
            for pair in (one, two):
                fill(pair.prefill.pools, layout, SOURCE, kv)
            for turn in range(4):
                source = (one, two)[turn % 2]
                key = RequestKey(f"r{turn}")
                await across(source, one, key)
                await one.decode.events.wait(lambda e, key=key: e.is_over(key))
                await source.prefill.events.wait(lambda e, key=key: e.is_over(key))
                assert differing(one.decode.pools, layout, DEST, kv) == []
                for plane in one.decode.planes:
                    assert {ends.sender_epoch for ends in plane._links} == {(11, 12)[turn % 2]}


@pytest.mark.parametrize("field", ["dtype", "rope", "model", "num_layers"])
async def test_a_pair_that_does_not_fit_is_refused_by_the_field(memory, field):
    layout = make_layout(1)
    value = 9 if field == "num_layers" else "other"
    fingerprint = make_fingerprint(layout, **{field: value})
    async with Pair(
        source=layout, dest=layout, backends=memory, dest_fingerprint=fingerprint
    ) as pair:
        pair.submit(KEY, 5)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        for worker in (pair.prefill, pair.decode):
            await worker.events.wait(lambda e: e.is_over(KEY))
            error = worker.events.ended_with(KEY)
            assert error.code is ErrorCode.HANDOFF_FAILED
            assert error.param == field
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_peers_with_another_backend_are_refused(memory):
    layout = make_layout(1)
    async with Pair(source=layout, dest=layout, backends=memory) as pair:
        pair.receiver._links = tuple(
            structs.replace(link, backend="carrier pigeon") for link in pair.receiver._links
        )
        pair.submit(KEY, 5)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        assert pair.decode.events.ended_with(KEY).param == "backend"
        assert pair.prefill.events.ended_with(KEY).param == "backend"


async def test_a_rank_that_cannot_listen_fails_the_start(memory):
    class Deaf:
        def submit(self, rank, command, finish):
            raise OSError("no rank")

    layout = make_layout(1)
    pair = Pair(source=layout, dest=layout, backends=memory, wrap=lambda _: Deaf())
    with pytest.raises(HandoffFailed, match="cannot listen"):
        await pair.receiver.start()
    await pair.__aexit__()


async def test_decode_learns_when_a_commit_is_due(any_backends):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=any_backends) as pair:
        await ready(pair)
        pair.sender.announce_commit(KEY, 0.25)
        await pair.decode.events.wait(lambda e: e.announced)
        assert pair.decode.events.announced == [(KEY, 0.25)]
        await finish(pair)
        pair.sender.announce_commit(KEY, 0.25)  # over: nothing is sent
        stale = CommitNotice(key=KEY, epoch=pair.prefill.ref.epoch, in_s=1.0)
        assert pair.receiver.on_commit_notice(stale) == Ack()
        assert len(pair.decode.events.announced) == 1


async def test_a_notice_of_another_epoch_is_ignored(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        pair.receiver.on_commit_notice(CommitNotice(key=KEY, epoch=12345, in_s=1.0))
        assert pair.decode.events.announced == []
