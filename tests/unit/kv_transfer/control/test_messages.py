"""What goes wrong with messages: lost, repeated, forged, stale, too early or too late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from kv_transfer.config import ChecksumKind
from kv_transfer.data.rank_commands import MoveCommand, RankCommand
from kv_transfer.plan.states import GrantState
from protocol import codec
from protocol.errors import DeadlineExceeded, ErrorCode, ErrorInfo, HandoffFailed, StaleMessage
from protocol.ids import RequestKey
from protocol.kv_layout import Cells
from protocol.messages import Ack, HandoffEnd
from rpc import methods
from tests.support.held import Held
from tests.support.transfer import (
    PATIENT,
    SECRET,
    Pair,
    differing,
    fill,
    make_layout,
    random_kv,
    reply_of,
    submitted,
)
from tests.support.transfer_steps import (
    DEST,
    KEY,
    LAND,
    LAYOUT,
    MORE,
    OTHER,
    SOURCE,
    disturb,
    finish,
    moves,
    piece_of,
    ready,
)


@pytest.mark.parametrize("method", [methods.GRANT, methods.PIECE, methods.COMMIT])
@pytest.mark.parametrize("how", ["lost", "reply lost", "twice"])
async def test_one_message_lost_or_repeated_changes_nothing(backends, method, how):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        hit = disturb(pair, method, how)
        kv = await ready(pair)
        await finish(pair)
        assert hit
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert len(pair.decode.events.commits) == len(pair.prefill.events.commits) == 1
        assert pair.decode.events.ends == pair.prefill.events.ends == []


async def test_everything_replayed_after_the_end_is_refused_and_touches_nothing(memory):
    """Replay a whole hand-off, also for the blocks' next owner."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await finish(pair)
        (piece,) = moves(pair.clients, "Piece")
        (grant,) = moves(pair.clients, "Grant")
        (commit,) = moves(pair.clients, "Commit")
        kv = await ready(pair, OTHER, SOURCE, DEST, seed=9)  # the same blocks
        with pytest.raises(StaleMessage):
            pair.receiver.on_piece(piece)
        with pytest.raises(StaleMessage):
            await reply_of(pair.receiver.on_commit, structs.replace(commit, tokens=(3,)))
        with pytest.raises(StaleMessage):
            pair.sender.on_grant(grant)
        await reply_of(pair.receiver.on_commit, commit)  # the very same: acknowledged, nothing else
        live = moves(pair.clients, "Grant")[1]
        forged = [
            structs.replace(piece, key=OTHER),
            structs.replace(piece, key=OTHER, ticket=live.ticket),  # an old generation
            structs.replace(piece, ticket=live.ticket),
            structs.replace(
                piece, key=OTHER, ticket=structs.replace(live.ticket, num_blocks=99), generation=2
            ),
        ]
        for bad in forged:
            with pytest.raises(StaleMessage):
                pair.receiver.on_piece(bad)
        assert len(pair.decode.events.commits) == 1
        await finish(pair, OTHER)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_pieces_of_another_incarnation_or_shape_are_refused(memory):
    config = replace(PATIENT, connect_timeout_s=0.2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        good = piece_of(pair, grant, num_cells=1, incarnation=5)
        with pytest.raises(StaleMessage):
            pair.receiver.on_piece(
                structs.replace(good, prefill=structs.replace(good.prefill, epoch=99))
            )
        for shape in (make_layout(2, head_dim=16), make_layout(2, dtype="bfloat16")):
            with pytest.raises(HandoffFailed) as caught:
                pair.receiver.on_piece(structs.replace(good, prefill_layout=shape))
            assert caught.value.param in ("head_dim", "dtype")
        pair.receiver.on_piece(good)
        with pytest.raises(StaleMessage) as stale:
            pair.receiver.on_piece(structs.replace(good, index=1, first_cell=1, incarnation=4))
        assert stale.value.param == "incarnation"


async def test_a_grant_is_withdrawn_only_while_nothing_moves(memory):
    """Its blocks are the caller's again at once, so nothing may write them later."""
    config = replace(PATIENT, connect_timeout_s=0.2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        assert not pair.receiver.withdraw(KEY)
        offered = RequestKey("b")
        pair.receiver.offer(offered, pair.ticket(offered, 5), pair.prefill.ref)
        assert not pair.receiver.withdraw(offered)
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        pair.receiver.on_piece(piece_of(pair, grant, num_cells=1, incarnation=5))
        assert not pair.receiver.withdraw(KEY)
        assert pair.receiver.num_blocks(GrantState.GRANTED) == len(DEST)


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


async def test_a_grant_taken_with_its_question_is_not_announced(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        kv = random_kv(LAYOUT, 5, seed=1)
        fill(pair.prefill.pools, LAYOUT, SOURCE, kv)
        pair.submit(KEY, 5)
        grant = pair.receiver.grant(KEY, (DEST,), 0, 5 * LAYOUT.block_size)
        assert pair.sender.take(grant) is True
        assert pair.sender.take(grant) is False
        assert pair.sender.on_grant(grant) == Ack()
        assert pair.prefill.events.grants == {}
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_a_grant_may_be_quicker_than_the_router(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        kv = random_kv(LAYOUT, 5, seed=1)
        fill(pair.prefill.pools, LAYOUT, SOURCE, kv)
        ticket = pair.ticket(KEY, 5)
        pair.receiver.offer(KEY, ticket, pair.prefill.ref)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        pair.sender.expect(KEY, ticket, pair.decode.ref)
        pair.sender.expect(KEY, ticket, pair.decode.ref)
        await pair.prefill.events.wait(lambda e: e.grants)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_an_end_may_be_quicker_than_the_router(memory):
    """Prefill refuses the prompt before decode has heard of it; and the other way round."""
    info = ErrorInfo(code=ErrorCode.CONTEXT_TOO_LONG, message="too long")
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        end = HandoffEnd(
            key=KEY, epoch=pair.prefill.ref.epoch, to_sender=False, released=False, error=info
        )
        await pair.receiver.on_end(end)
        await pair.sender.on_end(structs.replace(end, epoch=pair.decode.ref.epoch))
        ticket = pair.ticket(KEY, 5)
        for submit in (
            lambda: pair.receiver.offer(KEY, ticket, pair.prefill.ref),
            lambda: pair.sender.expect(KEY, ticket, pair.decode.ref),
        ):
            with pytest.raises(type(info.to_error()), match="too long"):
                submit()


async def test_an_early_end_of_another_incarnation_does_not_count(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        end = HandoffEnd(key=KEY, epoch=99, to_sender=False, released=False)
        await pair.receiver.on_end(end)
        await pair.sender.on_end(end)
        kv = await ready(pair)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_an_end_of_another_incarnation_is_refused(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        end = HandoffEnd(key=KEY, epoch=99, to_sender=False, released=True)
        with pytest.raises(StaleMessage):
            await pair.receiver.on_end(end)
        with pytest.raises(StaleMessage):
            await pair.sender.on_end(end)
        assert pair.receiver.num_live == pair.sender.num_live == 1


@pytest.mark.parametrize("change", [{"num_blocks": 99}, {"receiver_epoch": 7}, {"sender_epoch": 7}])
async def test_tickets_that_do_not_fit_are_refused_at_submission(memory, change):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        good = pair.ticket(KEY, 5)
        forged = structs.replace(good, **change)
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
        with pytest.raises(ValueError, match="before all"):
            pair.sender.commit(KEY, (1,))
        with pytest.raises(ValueError, match="already"):
            await pair.receiver.reserve(KEY, (LAND,), 0)


async def test_a_reservation_beyond_the_ticket_fails_the_handoff_and_returns_the_blocks(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 2)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        assert pair.decode.events.safe == [(KEY, DEST)]
        assert pair.decode.events.ended_with(KEY).param == "num_blocks"
        assert pair.receiver.num_blocks(GrantState.GRANTED) == 0
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))


def test_an_order_names_exactly_one_thing(memory):
    pair = Pair(source=LAYOUT, dest=LAYOUT, backends=memory)
    plane = pair.prefill.planes[0]
    for data in (codec.encode(RankCommand()), b"\xc1"):
        result = plane.execute(data).result(60)
        assert b"invalid_request" in result
    refused = submitted(plane, RankCommand()).result(60).error
    assert (refused.code, refused.param) == ("invalid_request", "command")
    command = MoveCommand(
        rank=0,
        sender_epoch=1,
        receiver_epoch=2,
        incarnation=1,
        generation=1,
        index=0,
        cells=Cells(blocks=(1,), size=4, count=1),
        first_layer=0,
        num_layers=1,
        parts=(),
    )
    assert b"invalid" not in plane.execute(RankCommand(send=command).encode()).result(60)
    for worker in (pair.prefill, pair.decode):
        for plane in worker.planes:
            plane.close()


async def test_a_grant_whose_replies_are_all_lost_still_serves_if_pieces_come(memory):
    config = replace(PATIENT, rpc_timeout_s=0.2, rpc_attempts=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        pushed = asyncio.Event()

        async def deaf(address, method, request):
            if method is methods.GRANT:
                await reply_of(pair.clients.handlers[address][method], request)
                await pushed.wait()
                raise DeadlineExceeded("lost")

        pair.clients.intercept = deaf
        kv = random_kv(LAYOUT, 5, seed=1)
        fill(pair.prefill.pools, LAYOUT, SOURCE, kv)
        pair.submit(KEY, 5)
        granting = asyncio.create_task(pair.receiver.reserve(KEY, (DEST,), 0))
        await pair.prefill.events.wait(lambda e: e.grants)
        pair.sender.push(KEY, SOURCE[:2], 0)
        while pair.receiver.stats.num_pieces < 1:
            await asyncio.sleep(0.01)
        pushed.set()
        await granting
        await finish(pair, first=2)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert pair.decode.events.ends == []


async def lose_a_piece(pair):
    """All is sent, but a rank of decode fails on it afterwards."""
    held = Held()

    def trouble():
        pair.decode.pools[0].before_scatter = lambda: None
        held()
        raise RuntimeError("once")

    pair.decode.pools[0].before_scatter = trouble
    kv = await ready(pair)
    pair.sender.push(KEY, SOURCE, 0)
    while pair.sender.stats.num_pieces == 0:
        await asyncio.sleep(0)
    held.release()
    return kv


async def test_a_commit_that_was_refused_proves_nothing_of_what_comes_again(memory):
    """Prefill gives up while it sends a lost piece once more, and what arrives has no content: a
    copy of the commit that the loss was the answer to must not make it decode's."""
    config = replace(PATIENT, checksum=ChecksumKind.NONE)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        handlers = pair.clients.handlers[pair.decode.ref.address]
        over = asyncio.Event()
        leaving = []

        async def fault(address, method, request):
            if method is methods.END:
                await over.wait()
            if method is methods.PIECE and request.incarnation > 1:
                await reply_of(handlers[method], request)
                leaving.append(asyncio.create_task(pair.sender.end(KEY, False)))
                await asyncio.sleep(0)

        await lose_a_piece(pair)
        pair.clients.intercept = fault
        pair.sender.commit(KEY, (1,))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        (commit,) = moves(pair.clients, "Commit")
        with pytest.raises(StaleMessage, match="was refused"):
            await reply_of(handlers[methods.COMMIT], commit)
        over.set()
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.commits == []
        await asyncio.gather(*leaving)


async def test_the_answer_that_pieces_were_lost_may_get_lost(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:

        async def fault(address, method, request):
            if method is methods.COMMIT and len(moves(pair.clients, "Commit")) == 1:
                with pytest.raises(HandoffFailed, match="did not arrive"):
                    await reply_of(pair.clients.handlers[address][method], request)
                raise DeadlineExceeded("lost")

        kv = await lose_a_piece(pair)
        pair.clients.intercept = fault
        pair.sender.commit(KEY, (1,))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert [commit.number for commit in moves(pair.clients, "Commit")] == [0, 0, 1]
        assert len(pair.decode.events.commits) == len(pair.prefill.events.commits) == 1
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
