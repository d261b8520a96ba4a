"""What goes wrong, on real data planes: aborts, broken and silent links, lost messages."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from kv_transfer.orders import MoveOrder, Order
from kv_transfer.ranks import RankChannel
from protocol import codec
from protocol.errors import DeadlineExceeded, ErrorCode, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey
from protocol.messages import HandoffEnd, Piece
from rpc import methods
from tests.support.transfer import QUICK, SECRET, Pair, differing, fill, make_layout, random_kv

KEY, OTHER = RequestKey("a"), RequestKey("b")
SOURCE, DEST = (3, 1, 4, 9, 5), (8, 2, 7, 1, 15)
MORE, LAND = (6, 7), (3, 4)
LAYOUT = make_layout(2)


class Gate:
    """A RankChannel that can hold back or swallow moves of one kind."""

    def __init__(self, ranks: RankChannel) -> None:
        self._ranks = ranks
        self.swallow_sends = 0
        self.held: list[asyncio.Event] = []

    async def execute(self, rank: int, order: bytes) -> bytes:
        if codec.decode(Order, order).send is not None and self.swallow_sends:
            self.swallow_sends -= 1
            await asyncio.Event().wait()
        return await self._ranks.execute(rank, order)


def moves(clients, name):
    return [request for called, request in clients.calls if called == name]


async def ready(pair, key=KEY, source=SOURCE, dest=DEST, seed=1):
    """Submit and grant; the source is filled."""
    kv = random_kv(LAYOUT, len(source), seed=seed)
    fill(pair.prefill.pools, LAYOUT, source, kv)
    pair.submit(key, len(dest))
    await pair.receiver.reserve(key, dest, 0)
    return kv


async def finish(pair, key=KEY, source=SOURCE, first=0):
    pair.sender.push(key, source[first:], first, len(source) - first)
    pair.sender.commit(key, 1)
    await pair.prefill.events.wait(lambda e: e.is_over(key))
    await pair.decode.events.wait(lambda e: e.is_over(key))


# --- aborts ---------------------------------------------------------------------------------------


async def test_blocks_are_safe_only_after_a_running_scatter_and_no_later_one_starts(backends):
    """A07: abort in the middle of a write; the next owner of the blocks must not be overwritten."""
    entered, release = threading.Event(), threading.Event()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:

        def slow() -> None:
            entered.set()
            assert release.wait(5)

        await ready(pair)
        pair.decode.pools[0].before_scatter = slow
        pair.sender.push(KEY, SOURCE[:2], 0, 2)
        pair.sender.push(KEY, SOURCE[2:], 2, 3)
        await asyncio.to_thread(entered.wait, 5)
        await pair.receiver.end(KEY, False, ErrorInfo(code=ErrorCode.CANCELLED, message="gone"))
        assert pair.decode.events.ended_with(KEY).code is ErrorCode.CANCELLED
        await asyncio.sleep(0.1)
        assert pair.decode.events.safe == []
        release.set()
        await pair.decode.events.wait(lambda e: e.safe)
        fill(pair.decode.pools, LAYOUT, DEST, torch.zeros_like(random_kv(LAYOUT, 5, seed=0)))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        await asyncio.sleep(0.1)
        assert differing(pair.decode.pools, LAYOUT, DEST, random_kv(LAYOUT, 5, seed=0) * 0) == []
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_source_blocks_are_free_only_after_a_running_gather(memory):
    entered, release = threading.Event(), threading.Event()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:

        def slow() -> None:
            entered.set()
            assert release.wait(5)

        await ready(pair)
        pair.prefill.pools[1].before_gather = slow
        pair.sender.push(KEY, SOURCE, 0, 5)
        await asyncio.to_thread(entered.wait, 5)
        ending = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0.1)
        assert pair.prefill.events.ends == []
        release.set()
        await ending
        assert pair.prefill.events.ends == [(KEY, None)]
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ends == [(KEY, None)]


async def test_a_cancelled_handoff_leaves_its_links_in_step(backends):
    """The next hand-off on the same links gets its own data and needs no new link."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        for turn in range(6):
            key = RequestKey(f"cancelled-{turn}")
            await ready(pair, key)
            for first in range(5):
                pair.sender.push(key, SOURCE[first : first + 1], first, 1)
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            side = (pair.sender, pair.receiver)[turn % 2]
            await side.end(key, turn % 3 == 0)
            await pair.decode.events.wait(lambda e, key=key: key in dict(e.safe))
        kv = await ready(pair)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert pair.sender.stats.relinked == 0


@pytest.mark.parametrize("released", [True, False])
async def test_an_end_of_either_side_reaches_the_other(memory, released):
    """Token 1 ended the request; or the client left; or one side failed."""
    error = None if released else ErrorInfo(code=ErrorCode.INTERNAL, message="broken")
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await ready(pair, OTHER, MORE, LAND)
        await pair.sender.end(KEY, released, error)
        await pair.receiver.end(OTHER, released, error)
        for side in (pair.prefill, pair.decode):
            await side.events.wait(lambda e: len(e.ends) == 2)
            assert dict(side.events.ends) == {KEY: error, OTHER: error}
        assert sorted(pair.decode.events.safe, key=str) == [(KEY, DEST), (OTHER, LAND)]
        pair.sender.push(KEY, SOURCE, 0, 5)  # the step thread did not know yet: ignored
        pair.sender.commit(KEY, 1)
        await pair.sender.end(KEY, True)
        await pair.receiver.end(KEY, True)
        assert len(moves(pair.clients, "Piece")) == 0


async def test_blocks_for_a_handoff_that_is_over_come_straight_back(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 5)
        await pair.sender.end(KEY, True)
        await pair.decode.events.wait(lambda e: e.ends)
        await pair.receiver.reserve(KEY, DEST, 0)
        assert pair.decode.events.safe == [(KEY, DEST)]
        await pair.receiver.reserve(RequestKey("never"), DEST, 0)
        assert pair.decode.events.safe[1:] == [(RequestKey("never"), DEST)]
        assert moves(pair.clients, "Grant") == []


async def test_leaving_after_the_commit_gives_the_blocks_back_once(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await finish(pair)
        await pair.receiver.end(KEY, True)
        await pair.receiver.end(KEY, True)
        assert pair.decode.events.safe == [(KEY, DEST)]
        assert pair.decode.events.ends == []


# --- links ----------------------------------------------------------------------------------------


async def test_a_link_that_dies_between_pieces_is_replaced_and_nothing_fails(backends):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        kv = await ready(pair)
        pair.sender.push(KEY, SOURCE[:2], 0, 2)
        async with asyncio.timeout(5):
            while pair.receiver.stats.num_pieces < 1:
                await asyncio.sleep(0.01)
        for plane in (*pair.prefill.planes, *pair.decode.planes):
            for thread in plane._links.values():
                thread._open.close()
        await finish(pair, first=2)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert pair.sender.stats.relinked == 1
        assert pair.prefill.events.ends == pair.decode.events.ends == []


async def test_a_send_that_never_comes_is_made_again_on_new_links(backends):
    """Prefill's ranks swallow an order: its deadline passes, the piece moves at the next
    attempt."""
    config = replace(QUICK, op_timeout_s=0.2, connect_timeout_s=0.2, repair_s=0.1)
    gates: list[Gate] = []

    def gate(ranks: RankChannel) -> RankChannel:
        gates.append(Gate(ranks))
        return gates[-1]

    async with Pair(
        source=LAYOUT, dest=LAYOUT, backends=backends, config=config, wrap=gate
    ) as pair:
        kv = await ready(pair)
        gates[0].swallow_sends = 2  # both ranks of one piece
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert pair.decode.events.ends == pair.prefill.events.ends == []
        asked = [g for g in moves(pair.clients, "Grant") if g.key == KEY]
        assert len(asked) > 1  # decode wanted to know whether prefill is still there


async def test_a_prefill_that_never_sends_nor_answers_is_given_up(memory):
    config = replace(
        QUICK, op_timeout_s=0.2, connect_timeout_s=0.2, repair_s=0.1, rpc_timeout_s=0.1
    )
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def silent(address, method, request):
            if address == pair.prefill.ref.address:
                raise DeadlineExceeded("frozen")

        await ready(pair)
        await ready(pair, OTHER, MORE, LAND)
        (grant, _) = moves(pair.clients, "Grant")
        pair.clients.intercept = silent
        piece = Piece(
            key=KEY,
            ticket=grant.ticket,
            generation=grant.generation,
            sequence=0,
            first_block=0,
            num_blocks=5,
            first_layer=0,
            num_layers=2,
            prefill=pair.prefill.ref,
            prefill_layout=LAYOUT,
            link=1,
        )
        await pair.receiver.on_piece(piece)
        await pair.decode.events.wait(lambda e: len(e.safe) == 2, 3)
        assert "does not answer" in pair.decode.events.ended_with(OTHER).message
        pair.clients.intercept = None


async def test_a_decode_worker_that_does_not_answer_fails_the_handoff_in_time(memory):
    config = replace(QUICK, rpc_timeout_s=0.1, rpc_attempts=2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def silent(address, method, request):
            if address == pair.decode.ref.address:
                await asyncio.sleep(0.1)
                raise DeadlineExceeded("no answer")

        await ready(pair)
        pair.clients.intercept = silent
        pair.sender.push(KEY, SOURCE, 0, 5)
        pair.sender.commit(KEY, 1)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY), 2)
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        pair.clients.intercept = None
        kv = await ready(pair, OTHER, MORE, LAND)
        await finish(pair, OTHER, MORE)
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []


async def test_leases_end_by_themselves(memory):
    """Neither side ever hears of the other again: timers end both and give the blocks back."""
    config = replace(QUICK, lease_s=0.2, rpc_timeout_s=0.1, rpc_attempts=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        pair.clients.handlers.clear()
        for side in (pair.prefill, pair.decode):
            await side.events.wait(lambda e: e.is_over(KEY), 2)
            assert "deadline" in side.events.ended_with(KEY).message
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_an_offer_that_is_never_granted_ends_with_its_ticket(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 5, ttl_s=0.2)
        for side in (pair.prefill, pair.decode):
            await side.events.wait(lambda e: e.is_over(KEY), 2)
            assert side.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        assert pair.decode.events.safe == []


async def test_a_lost_peer_ends_its_handoffs_at_once(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await pair.receiver.peer_lost(pair.prefill.ref.epoch)
        await pair.sender.peer_lost(pair.decode.ref.epoch)
        assert "lost" in pair.decode.events.ended_with(KEY).message
        assert "lost" in pair.prefill.events.ended_with(KEY).message
        assert moves(pair.clients, "End") == []


async def test_corrupted_bytes_are_found_at_commit(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        plane = pair.decode.planes[1]
        checksum = plane._checksum

        def corrupt(staging, order, name):
            staging[3] ^= 1
            return checksum(staging, order, name)

        plane._checksum = corrupt
        await finish(pair)
        for side in (pair.prefill, pair.decode):
            assert side.events.ended_with(KEY).param == "checksum"
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_a_pool_that_fails_fails_the_handoff_only(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:

        def broken() -> None:
            pair.decode.pools[0].before_scatter = lambda: None
            raise RuntimeError("out of luck")

        kv = await ready(pair)
        pair.decode.pools[0].before_scatter = broken
        await finish(pair)
        if pair.decode.events.commits:  # the piece was sent again on a new link
            assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        kv = await ready(pair, OTHER, MORE, LAND)
        await finish(pair, OTHER, MORE)
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [methods.GRANT, methods.PIECE, methods.COMMIT])
@pytest.mark.parametrize("how", ["lost", "reply lost", "twice"])
async def test_one_message_lost_or_repeated_changes_nothing(backends, method, how):
    config = replace(QUICK, rpc_timeout_s=0.3)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        hit = []

        async def fault(address, called, request):
            if called is not method or len(hit) > 0:
                return
            hit.append(request)
            if how != "lost":
                await pair.clients.handlers[address][called](request)
            if how != "twice":
                raise DeadlineExceeded("lost")

        pair.clients.intercept = fault
        kv = await ready(pair)
        await finish(pair)
        assert hit
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert len(pair.decode.events.commits) == len(pair.prefill.events.commits) == 1
        assert pair.decode.events.ends == pair.prefill.events.ends == []


async def test_everything_replayed_after_the_end_is_refused_and_touches_nothing(memory):
    """A09: replay a whole hand-off, also for the blocks' next owner."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await finish(pair)
        (piece,) = moves(pair.clients, "Piece")
        (grant,) = moves(pair.clients, "Grant")
        (commit,) = moves(pair.clients, "Commit")
        kv = await ready(pair, OTHER, SOURCE, DEST, seed=9)  # the same blocks
        with pytest.raises(StaleMessage):
            await pair.receiver.on_piece(piece)
        with pytest.raises(StaleMessage):
            await pair.receiver.on_commit(replace(commit, first_token=3))
        with pytest.raises(StaleMessage):
            await pair.sender.on_grant(grant)
        await pair.receiver.on_commit(commit)  # the very same: acknowledged, nothing else
        live = moves(pair.clients, "Grant")[1]
        forged = [
            replace(piece, key=OTHER),
            replace(piece, key=OTHER, ticket=live.ticket),  # an old generation
            replace(piece, ticket=live.ticket),
            replace(piece, key=OTHER, ticket=replace(live.ticket, num_blocks=99), generation=2),
        ]
        for bad in forged:
            with pytest.raises(StaleMessage):
                await pair.receiver.on_piece(bad)
        assert len(pair.decode.events.commits) == 1
        await finish(pair, OTHER)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_pieces_of_another_incarnation_or_shape_are_refused(memory):
    config = replace(QUICK, connect_timeout_s=0.2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        good = Piece(
            key=KEY,
            ticket=grant.ticket,
            generation=grant.generation,
            sequence=0,
            first_block=0,
            num_blocks=1,
            first_layer=0,
            num_layers=2,
            prefill=pair.prefill.ref,
            prefill_layout=LAYOUT,
            link=5,
        )
        with pytest.raises(StaleMessage):
            await pair.receiver.on_piece(replace(good, prefill=replace(good.prefill, epoch=99)))
        for shape in (make_layout(2, head_dim=16), make_layout(2, dtype="bfloat16")):
            with pytest.raises(HandoffFailed) as caught:
                await pair.receiver.on_piece(replace(good, prefill_layout=shape))
            assert caught.value.param in ("head_dim", "dtype")
        await pair.receiver.on_piece(good)
        with pytest.raises(StaleMessage) as stale:
            await pair.receiver.on_piece(replace(good, sequence=1, first_block=1, link=4))
        assert stale.value.param == "link"


async def test_a_new_attempt_replaces_the_old_one_on_both_sides(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        newer = RequestKey("a", 1)
        kv = await ready(pair, newer, MORE, LAND)
        await pair.decode.events.wait(lambda e: e.safe == [(KEY, DEST)])
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.STALE_MESSAGE
        await finish(pair, newer, MORE)
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []
        with pytest.raises(StaleMessage):
            pair.receiver.offer(KEY, pair.ticket(KEY, 5), pair.prefill.ref)
        with pytest.raises(StaleMessage):
            pair.sender.expect(KEY, pair.ticket(KEY, 5), pair.decode.ref)


async def test_a_grant_may_be_quicker_than_the_router(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        kv = random_kv(LAYOUT, 5, seed=1)
        fill(pair.prefill.pools, LAYOUT, SOURCE, kv)
        ticket = pair.ticket(KEY, 5)
        pair.receiver.offer(KEY, ticket, pair.prefill.ref)
        await pair.receiver.reserve(KEY, DEST, 0)
        pair.sender.expect(KEY, ticket, pair.decode.ref)
        pair.sender.expect(KEY, ticket, pair.decode.ref)
        await pair.prefill.events.wait(lambda e: e.grants)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_an_end_may_be_quicker_than_the_router(memory):
    """A02: prefill refuses the prompt before decode has heard of it; and the other way round."""
    info = ErrorInfo(code=ErrorCode.CONTEXT_TOO_LONG, message="too long")
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        end = HandoffEnd(key=KEY, epoch=pair.prefill.ref.epoch, released=False, error=info)
        await pair.receiver.on_end(end)
        await pair.sender.on_end(replace(end, epoch=pair.decode.ref.epoch))
        ticket = pair.ticket(KEY, 5)
        for submit in (
            lambda: pair.receiver.offer(KEY, ticket, pair.prefill.ref),
            lambda: pair.sender.expect(KEY, ticket, pair.decode.ref),
        ):
            with pytest.raises(type(info.to_error()), match="too long"):
                submit()


async def test_an_early_end_of_another_incarnation_does_not_count(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        end = HandoffEnd(key=KEY, epoch=99, released=False)
        await pair.receiver.on_end(end)
        await pair.sender.on_end(end)
        kv = await ready(pair)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_an_end_of_another_incarnation_is_refused(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        end = HandoffEnd(key=KEY, epoch=99, released=True)
        with pytest.raises(StaleMessage):
            await pair.receiver.on_end(end)
        with pytest.raises(StaleMessage):
            await pair.sender.on_end(end)
        assert pair.receiver.num_live == pair.sender.num_live == 1


@pytest.mark.parametrize("change", [{"num_blocks": 99}, {"decode_epoch": 7}, {"prefill_epoch": 7}])
async def test_tickets_that_do_not_fit_are_refused_at_submission(memory, change):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        good = pair.ticket(KEY, 5)
        forged = replace(good, **change)
        bad = [forged] if "num_blocks" in change else [forged, forged.signed(SECRET)]
        for ticket in bad:
            with pytest.raises(StaleMessage):
                pair.receiver.offer(KEY, ticket, pair.prefill.ref)
            with pytest.raises(StaleMessage):
                pair.sender.expect(KEY, ticket, pair.decode.ref)
        with pytest.raises(StaleMessage):
            pair.receiver.offer(OTHER, good, pair.prefill.ref)
        assert pair.receiver.num_live == pair.sender.num_live == 0


async def test_misuse_is_told_at_once(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        with pytest.raises(ValueError, match="block ids"):
            pair.sender.push(KEY, SOURCE, 0, 4)
        with pytest.raises(ValueError, match="before all"):
            pair.sender.commit(KEY, 1)
        with pytest.raises(ValueError, match="already"):
            await pair.receiver.reserve(KEY, LAND, 0)


async def test_a_reservation_beyond_the_ticket_fails_the_handoff_and_returns_the_blocks(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 2)
        await pair.receiver.reserve(KEY, DEST, 0)
        assert pair.decode.events.safe == [(KEY, DEST)]
        assert pair.decode.events.ended_with(KEY).param == "num_blocks"
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))


def test_an_order_names_exactly_one_thing(memory):
    pair = Pair(source=LAYOUT, dest=LAYOUT, backends=memory)
    plane = pair.prefill.planes[0]
    for data in (codec.encode(Order()), b"\xc1"):
        outcome = plane.execute(data).result(1)
        assert b"invalid_request" in outcome
    order = MoveOrder(
        rank=0,
        sender_epoch=1,
        receiver_epoch=2,
        link=1,
        generation=1,
        sequence=0,
        blocks=(1,),
        first_layer=0,
        num_layers=1,
        parts=(),
    )
    assert b"invalid" not in plane.execute(Order(send=order).encode()).result(1)
    for side in (pair.prefill, pair.decode):
        for plane in side.planes:
            plane.close()


async def test_a_newer_link_frees_a_receive_that_waits_on_the_old_one(backends):
    """Decode posted for a sender that gave up: the next piece does not wait for that."""
    config = replace(QUICK, op_timeout_s=30, connect_timeout_s=30)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        stuck = Piece(
            key=KEY,
            ticket=grant.ticket,
            generation=grant.generation,
            sequence=0,
            first_block=0,
            num_blocks=5,
            first_layer=0,
            num_layers=2,
            prefill=pair.prefill.ref,
            prefill_layout=LAYOUT,
            link=1,
        )
        await pair.receiver.on_piece(stuck)
        await asyncio.sleep(0.05)
        pair.sender._lanes.get(pair.decode.ref)._renew(1)
        async with asyncio.timeout(5):
            await finish(pair)
        assert len(pair.decode.events.commits) == 1
