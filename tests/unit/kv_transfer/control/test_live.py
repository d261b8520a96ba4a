"""Hand-offs of sequences that run on the sender, and who owns them after a failure."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from protocol.errors import DeadlineExceeded, ErrorCode, HandoffFailed
from protocol.ids import RequestKey
from protocol.messages import HandoffEnd
from tests.support.transfer import Pair, differing, fill, make_layout, random_kv, reply_of
from tests.support.transfer_steps import DEST, KEY, LAYOUT, SOURCE, moves

TOKENS = (7, 8, 9)


async def live(pair: Pair, key: RequestKey = KEY):
    """Accepted and granted; the source is filled."""
    kv = random_kv(LAYOUT, len(SOURCE), seed=1)
    fill(pair.prefill.pools, LAYOUT, SOURCE, kv)
    ticket = pair.ticket(key, len(DEST))
    pair.receiver.offer(key, ticket, pair.prefill.ref)
    pair.sender.expect(key, ticket, pair.decode.ref, live=True)
    await pair.receiver.reserve(key, (DEST,), 0)
    return kv


async def test_the_sender_learns_once_that_everything_is_sent(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        kv = await live(pair)
        pair.sender.push(KEY, SOURCE[:2], 0)
        while not pair.sender.stats.num_pieces:
            await asyncio.sleep(0.001)
        assert pair.prefill.events.sends == []
        pair.sender.push(KEY, SOURCE[2:], 2)
        await pair.prefill.events.wait(lambda e: e.sends)
        pair.sender.commit(KEY, TOKENS)
        await pair.decode.events.wait(lambda e: e.commits)
        await pair.prefill.events.wait(lambda e: e.commits)
        assert pair.decode.events.commits[0][1].tokens == TOKENS
        assert pair.prefill.events.sends == [KEY]
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_a_sequence_without_a_full_block_is_only_committed(memory):
    async with Pair(source=LAYOUT, dest=make_layout(1), backends=memory) as pair:
        ticket = pair.ticket(KEY, 1)
        pair.receiver.offer(KEY, ticket, pair.prefill.ref)
        pair.sender.expect(KEY, ticket, pair.decode.ref, live=True)
        await pair.receiver.reserve(KEY, ((),), 0, 0)
        pair.sender.commit(KEY, ())
        await pair.prefill.events.wait(lambda e: e.commits)
        assert pair.decode.events.commits[0][1].tokens == ()
        assert moves(pair.clients, "Piece") == []


async def test_nothing_is_sent_of_a_block_whose_beginning_the_receiver_has(memory):
    source, dest = (make_layout(1, block_size=size) for size in (8, 4))
    async with Pair(source=source, dest=dest, backends=memory) as pair:
        ticket = pair.ticket(KEY, 1)
        pair.receiver.offer(KEY, ticket, pair.prefill.ref)
        pair.sender.expect(KEY, ticket, pair.decode.ref, live=True)
        await pair.receiver.reserve(KEY, (DEST[:1],), 1, 4)
        pair.sender.push(KEY, SOURCE[:1], 0)
        assert pair.prefill.events.sends == [KEY]
        pair.sender.commit(KEY, TOKENS)
        await pair.prefill.events.wait(lambda e: e.commits)
        assert pair.decode.events.commits[0][1].tokens == TOKENS
        assert moves(pair.clients, "Piece") == []


@pytest.mark.parametrize("lost", ["request", "reply"])
async def test_without_an_answer_to_the_commit_the_owner_is_unknown(memory, lost):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await live(pair)
        pair.sender.push(KEY, SOURCE, 0)
        await pair.prefill.events.wait(lambda e: e.sends)

        async def silent(address, method, request):
            if method.name == "Commit":
                if lost == "reply":
                    await reply_of(pair.receiver.on_commit, request)
                raise DeadlineExceeded("no answer")

        pair.clients.intercept = silent
        pair.sender.commit(KEY, TOKENS)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert pair.prefill.events.uncertain == [KEY]
        assert (lost == "reply") is bool(pair.decode.events.commits)


@pytest.mark.parametrize("how", ["refused", "ended", "gone", "late"])
async def test_what_was_not_committed_is_still_the_senders(memory, how):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await live(pair)
        if how == "ended":
            await pair.receiver.end(KEY, False, HandoffFailed("no room").info())
        elif how == "gone":
            await pair.sender.peer_lost(pair.decode.ref.epoch)
        elif how == "late":
            pair.sender.expire(1e12)
        else:
            pair.sender.push(KEY, SOURCE, 0)
            await pair.prefill.events.wait(lambda e: e.sends)
            known = pair.receiver._live[KEY]
            known.ticket = structs.replace(known.ticket, num_blocks=99)  # refuses the commit
            pair.sender.commit(KEY, TOKENS)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert pair.prefill.events.ended_with(KEY) is not None
        assert pair.prefill.events.uncertain == []


async def test_a_peer_that_is_lost_while_it_may_commit_may_own_the_sequence(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await live(pair)
        pair.sender.push(KEY, SOURCE, 0)
        await pair.prefill.events.wait(lambda e: e.sends)

        async def leave(address, method, request):
            if method.name == "Commit":
                await pair.sender.peer_lost(pair.decode.ref.epoch)

        pair.clients.intercept = leave
        pair.sender.commit(KEY, TOKENS)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        assert pair.prefill.events.uncertain == [KEY]


async def test_a_sender_that_is_told_of_the_loss_of_its_receiver_goes_on(memory):
    """By a router, in place of the receiver, which does not answer the commit."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await live(pair)
        pair.sender.push(KEY, SOURCE, 0)
        await pair.prefill.events.wait(lambda e: e.sends)
        asked, answer = asyncio.Event(), asyncio.Event()

        async def silent(address, method, request):
            if method.name == "Commit":
                asked.set()
                await answer.wait()
                raise DeadlineExceeded("no answer")

        pair.clients.intercept = silent
        pair.sender.commit(KEY, TOKENS)
        await asked.wait()
        epoch = pair.decode.ref.epoch
        await pair.sender.on_end(HandoffEnd(key=KEY, epoch=epoch, to_sender=True, released=False))
        assert pair.prefill.events.is_over(KEY)
        answer.set()
        assert pair.prefill.events.uncertain == []
