"""What goes wrong, on real data planes: aborts, broken and silent links, lost messages."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest
import torch

from kv_transfer.control.context import RankChannel
from kv_transfer.data.rank_commands import CloseCommand, Finish, RankCommand, RankResult
from kv_transfer.plan.handoff_state import HandoffState, PiecesLost
from protocol.errors import (
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    HandoffFailed,
    StaleMessage,
    Unavailable,
)
from protocol.ids import RequestKey
from protocol.messages import Commit, Grant, Piece
from rpc import methods
from tests.support.held import Held
from tests.support.transfer import PATIENT, Pair, differing, fill, random_kv, reply_of, submitted
from tests.support.transfer_steps import (
    DEST,
    KEY,
    LAND,
    LAYOUT,
    MORE,
    OTHER,
    SOURCE,
    finish,
    moves,
    piece_of,
    ready,
)

#: Receives that get no data end soon.
BRISK = replace(PATIENT, op_timeout_s=2, connect_timeout_s=2)


class Gate:
    """A RankChannel that can hold back or swallow moves of one kind."""

    def __init__(self, ranks: RankChannel) -> None:
        self._ranks = ranks
        self.swallow_sends = 0
        self._swallowed: list[Finish] = []

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        if command.send is not None and self.swallow_sends:
            self.swallow_sends -= 1
            self._swallowed.append(finish)
        else:
            self._ranks.submit(rank, command, finish)

    def let_go(self) -> None:
        """End what was swallowed."""
        for end in self._swallowed:
            end(RankResult(error=HandoffFailed("swallowed").info()))


# --- aborts ---------------------------------------------------------------------------------------


async def test_blocks_are_safe_only_after_a_running_scatter_and_no_later_one_starts(backends):
    """Abort in the middle of a write; the next owner of the blocks must not be overwritten."""
    held = Held()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        await ready(pair)
        pair.decode.pools[0].before_scatter = held
        pair.sender.push(KEY, SOURCE[:2], 0)
        pair.sender.push(KEY, SOURCE[2:], 2)
        assert await asyncio.to_thread(held.begun)
        await pair.receiver.end(KEY, False, ErrorInfo(code=ErrorCode.CANCELLED, message="gone"))
        assert pair.decode.events.ended_with(KEY).code is ErrorCode.CANCELLED
        await asyncio.sleep(0.1)
        assert pair.decode.events.safe == []
        held.release()
        await pair.decode.events.wait(lambda e: e.safe)
        fill(pair.decode.pools, LAYOUT, DEST, torch.zeros_like(random_kv(LAYOUT, 5, seed=0)))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        await asyncio.sleep(0.1)
        assert differing(pair.decode.pools, LAYOUT, DEST, random_kv(LAYOUT, 5, seed=0) * 0) == []
        assert pair.decode.events.safe == [(KEY, DEST)]


class Deaf:
    """A RankChannel to ranks that cannot be asked to stop."""

    def __init__(self, ranks: RankChannel) -> None:
        self._ranks = ranks

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        if command.revoke is not None:
            raise Unavailable("the rank is gone")
        self._ranks.submit(rank, command, finish)


async def test_blocks_wait_for_what_moves_on_ranks_that_cannot_be_asked(memory):
    reading, writing = Held(), Held()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, wrap=Deaf) as pair:
        await ready(pair)
        pair.prefill.pools[0].before_gather = reading
        pair.decode.pools[1].before_scatter = writing
        pair.sender.push(KEY, SOURCE, 0)
        assert await asyncio.to_thread(reading.begun)
        assert await asyncio.to_thread(writing.begun)
        ending = asyncio.create_task(pair.sender.end(KEY, True))
        await pair.decode.events.wait(lambda e: e.ends == [(KEY, None)])
        await asyncio.sleep(0.1)
        assert pair.prefill.events.ends == []
        assert pair.decode.events.safe == []
        reading.release()
        await ending
        writing.release()
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.prefill.events.ends == [(KEY, None)]
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_a_commit_that_waits_learns_at_once_of_the_end(memory):
    config = replace(PATIENT, op_timeout_s=60, connect_timeout_s=60)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        pair.receiver.on_piece(piece_of(pair, grant))  # and nothing is sent
        commit = Commit(
            key=KEY,
            ticket=grant.ticket,
            generation=grant.generation,
            tokens=(1,),
            num_pieces=1,
            num_blocks=5,
        )
        waiting = asyncio.create_task(reply_of(pair.receiver.on_commit, commit))
        await asyncio.sleep(0)
        await pair.receiver.end(KEY, True)
        async with asyncio.timeout(60):
            with pytest.raises(StaleMessage, match="released"):
                await waiting


async def test_a_piece_that_comes_again_while_prefill_is_asked_needs_no_answer(memory):
    config = replace(BRISK, repair_s=0.1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        pair.receiver.on_piece(piece_of(pair, grant))
        asked = asyncio.Event()

        async def again_and_lost(address, method, request):
            if method is methods.GRANT:
                pair.clients.intercept = None
                pair.receiver.on_piece(piece_of(pair, grant, incarnation=2))
                asked.set()
                raise DeadlineExceeded("lost")

        pair.clients.intercept = again_and_lost
        close = CloseCommand(sender_epoch=11, receiver_epoch=22, incarnation=1)
        for plane in pair.decode.planes:
            submitted(plane, RankCommand(close=close)).result(60)
        async with asyncio.timeout(60):
            await asked.wait()
        await asyncio.sleep(0)
        assert pair.receiver.num_live == 1
        assert pair.decode.events.ends == []


async def test_source_blocks_are_free_only_after_a_running_gather(memory):
    held = Held()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        pair.prefill.pools[1].before_gather = held
        pair.sender.push(KEY, SOURCE, 0)
        assert await asyncio.to_thread(held.begun)
        ending = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0.1)
        assert pair.prefill.events.ends == []
        held.release()
        await ending
        assert pair.prefill.events.ends == [(KEY, None)]
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ends == [(KEY, None)]


async def test_nothing_is_committed_after_the_end(memory):
    held = Held()
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        pair.prefill.pools[0].before_gather = held
        pair.sender.push(KEY, SOURCE, 0)
        pair.sender.commit(KEY, (1,))
        assert await asyncio.to_thread(held.begun)
        ending = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0)
        held.release()
        await ending
        await pair.decode.events.wait(lambda e: e.safe)
        await pair.sender.close()
        assert moves(pair.clients, "Commit") == []


async def test_a_cancelled_handoff_leaves_its_links_in_step(backends):
    """The next hand-off on the same links gets its own data and needs no new link."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        for turn in range(6):
            key = RequestKey(f"cancelled-{turn}")
            await ready(pair, key)
            for first in range(5):
                pair.sender.push(key, SOURCE[first : first + 1], first)
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            worker = (pair.sender, pair.receiver)[turn % 2]
            await worker.end(key, turn % 3 == 0)
            await pair.decode.events.wait(lambda e, key=key: key in dict(e.safe))
        kv = await ready(pair)
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        assert pair.sender.stats.relinked == 0


@pytest.mark.parametrize("released", [True, False])
async def test_an_end_of_either_side_reaches_the_other(memory, released):
    """Token 1 ended the request; or the client left; or one worker failed."""
    error = None if released else ErrorInfo(code=ErrorCode.INTERNAL, message="broken")
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await ready(pair, OTHER, MORE, LAND)
        await pair.sender.end(KEY, released, error)
        await pair.receiver.end(OTHER, released, error)
        for worker in (pair.prefill, pair.decode):
            await worker.events.wait(lambda e: len(e.ends) == 2)
            assert dict(worker.events.ends) == {KEY: error, OTHER: error}
        assert sorted(pair.decode.events.safe, key=str) == [(KEY, DEST), (OTHER, LAND)]
        pair.sender.push(KEY, SOURCE, 0)  # the step thread did not know yet: ignored
        pair.sender.commit(KEY, (1,))
        await pair.sender.end(KEY, True)
        await pair.receiver.end(KEY, True)
        assert len(moves(pair.clients, "Piece")) == 0


async def test_blocks_for_a_handoff_that_is_over_come_straight_back(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 5)
        await pair.sender.end(KEY, True)
        await pair.decode.events.wait(lambda e: e.ends)
        await pair.receiver.reserve(KEY, (DEST,), 0)
        assert pair.decode.events.safe == [(KEY, DEST)]
        await pair.receiver.reserve(RequestKey("never"), (DEST,), 0)
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
        pair.sender.push(KEY, SOURCE[:2], 0)
        async with asyncio.timeout(60):
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
    """Prefill's ranks swallow a command: its deadline passes, the piece moves at the next
    attempt."""
    config = replace(PATIENT, op_timeout_s=0.5, connect_timeout_s=0.5, repair_s=0.05)
    gates: list[Gate] = []

    def gate(ranks: RankChannel) -> RankChannel:
        gates.append(Gate(ranks))
        return gates[-1]

    async with Pair(
        source=LAYOUT, dest=LAYOUT, backends=backends, config=config, wrap=gate
    ) as pair:
        asked = asyncio.Event()

        async def watch(address, method, request):
            if method is methods.GRANT and len(moves(pair.clients, "Grant")) > 1:
                asked.set()
            if method is methods.PIECE and len(moves(pair.clients, "Piece")) > 1:
                await asked.wait()  # decode wants to know whether prefill is still there

        kv = await ready(pair)
        pair.clients.intercept = watch
        gates[0].swallow_sends = 2  # both ranks of one piece
        async with asyncio.timeout(60):
            await finish(pair)
        assert pair.decode.events.ends == pair.prefill.events.ends == []
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        gates[0].let_go()


async def test_a_prefill_that_never_sends_nor_answers_is_given_up(memory):
    config = replace(
        PATIENT, op_timeout_s=0.2, connect_timeout_s=0.2, repair_s=0.1, rpc_timeout_s=0.1
    )
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def silent(address, method, request):
            if address == pair.prefill.ref.address:
                raise DeadlineExceeded("frozen")

        await ready(pair)
        await ready(pair, OTHER, MORE, LAND)
        (grant, _) = moves(pair.clients, "Grant")
        pair.clients.intercept = silent
        piece = piece_of(pair, grant)
        pair.receiver.on_piece(piece)
        await pair.decode.events.wait(lambda e: len(e.safe) == 2)
        assert "does not answer" in pair.decode.events.ended_with(OTHER).message
        pair.clients.intercept = None


async def test_a_decode_worker_that_does_not_answer_fails_the_handoff_in_time(memory):
    config = replace(PATIENT, rpc_attempts=2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def silent(address, method, request):
            if address == pair.decode.ref.address:
                await asyncio.sleep(0.1)
                raise DeadlineExceeded("no answer")

        await ready(pair)
        pair.clients.intercept = silent
        pair.sender.push(KEY, SOURCE, 0)
        pair.sender.commit(KEY, (1,))
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        pair.clients.intercept = None
        kv = await ready(pair, OTHER, MORE, LAND)
        await finish(pair, OTHER, MORE)
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []


async def test_a_decode_worker_that_takes_no_end_is_given_up_with_all_that_is_meant_for_it(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:

        async def silent(address, method, request):
            if address == pair.decode.ref.address:
                raise DeadlineExceeded("frozen")

        await ready(pair)
        await ready(pair, OTHER, MORE, LAND)
        pair.clients.intercept = silent
        await pair.sender.end(KEY, True)
        await pair.prefill.events.wait(lambda e: e.is_over(OTHER))
        assert "does not answer" in pair.prefill.events.ended_with(OTHER).message
        pair.clients.intercept = None


async def test_a_sender_that_gives_up_lost_pieces_tells_decode(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=BRISK) as pair:

        async def lose(address, method, request):
            if method is methods.COMMIT:
                raise PiecesLost([0])

        await ready(pair)
        pair.clients.intercept = lose
        await finish(pair)
        for worker in (pair.prefill, pair.decode):
            assert worker.events.ended_with(KEY).param == "lost:0"
        assert len(moves(pair.clients, "Commit")) == BRISK.piece_attempts


async def test_announcements_do_not_wait_for_each_other(memory):
    config = replace(PATIENT, max_piece_bytes=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        waiting = 0
        enough = asyncio.Event()

        async def together(address, method, request):
            nonlocal waiting
            if method is methods.PIECE:
                waiting += 1
                if waiting == config.pipeline_depth:
                    asyncio.get_running_loop().call_soon(enough.set)
                await enough.wait()

        kv = await ready(pair)
        pair.clients.intercept = together
        async with asyncio.timeout(60):
            await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        turns = [piece.turn for piece in moves(pair.clients, "Piece")]
        assert turns == sorted(set(turns))
        assert len(turns) == len(SOURCE)


async def test_a_piece_that_is_overtaken_takes_another_turn_on_the_same_link(memory):
    config = replace(PATIENT, max_piece_bytes=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        overtaken = []

        async def late(address, method, request):
            if method is methods.PIECE and request.index == 1 and not overtaken:
                overtaken.append(request.turn)
                await asyncio.sleep(0.05)

        kv = await ready(pair)
        pair.clients.intercept = late
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        pieces = [each for each in moves(pair.clients, "Piece") if each.index == 1]
        assert len(pieces) == 2
        assert pieces[0].turn == overtaken[0] < pieces[1].turn
        assert pair.sender.stats.relinked == pair.receiver.stats.relinked == 0


@pytest.mark.parametrize("method", [methods.GRANT, methods.PIECE, methods.COMMIT])
async def test_of_a_handoff_that_failed_only_the_reason_is_kept(memory, method):
    key = RequestKey("refused")
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:

        async def refuse(address, name, request):
            if name is method:
                raise HandoffFailed("refused", param="x")

        pair.clients.intercept = refuse
        await ready(pair, key)
        if method is not methods.GRANT:
            pair.sender.push(key, SOURCE, 0)
            pair.sender.commit(key, (1,))
            await pair.prefill.events.wait(lambda e: e.is_over(key))
        await pair.sender.end(key, True)
        await pair.receiver.end(key, True)
        await pair.decode.events.wait(lambda e: e.is_over(key) and e.safe)
        await asyncio.sleep(0.05)  # tasks end
        pair.clients.calls.clear()
        pair.prefill.events.grants.clear()
        gc.collect()
        kinds = (HandoffState, Grant, Piece, Commit)
        left = [each for each in gc.get_objects() if isinstance(each, kinds)]
        assert [type(each) for each in left if each.key == key] == []


async def test_a_lost_peer_ends_its_handoffs_at_once(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        await pair.receiver.peer_lost(pair.prefill.ref.epoch)
        await pair.sender.peer_lost(pair.decode.ref.epoch)
        assert "lost" in pair.decode.events.ended_with(KEY).message
        assert "lost" in pair.prefill.events.ended_with(KEY).message
        assert moves(pair.clients, "End") == []


async def test_links_of_a_worker_that_was_only_silent_are_not_taken_again(backends):
    """Decode has dropped what it had posted; prefill lives, and may have that queued to send."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        pair.receiver.on_piece(piece_of(pair, grant))
        await pair.receiver.peer_lost(pair.prefill.ref.epoch)
        kv = await ready(pair, OTHER, MORE, LAND)
        await finish(pair, OTHER, MORE)
        refused, taken = [piece.incarnation for piece in moves(pair.clients, "Piece")]
        assert refused == 1 < taken
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []


async def test_nothing_is_sent_on_links_that_were_given_up_meanwhile(memory):
    """Decode is found silent while a piece is announced, and answers then."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=BRISK) as pair:

        async def lost(address, method, request):
            if method is methods.PIECE:
                pair.clients.intercept = None
                await pair.sender.peer_lost(pair.decode.ref.epoch)

        await ready(pair)
        pair.clients.intercept = lost
        pair.sender.push(KEY, SOURCE, 0)
        await pair.prefill.events.wait(lambda e: e.is_over(KEY))
        await pair.decode.events.wait(lambda e: e.safe)
        assert [plane._links for plane in pair.prefill.planes] == [{}, {}]
        kv = await ready(pair, OTHER, MORE, LAND)
        await finish(pair, OTHER, MORE)
        assert differing(pair.decode.pools, LAYOUT, LAND, kv) == []


async def test_corrupted_bytes_are_found_at_commit(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        await ready(pair)
        (backend,) = pair.decode.planes[1]._backends.values()
        accept = backend.accept

        def accept_corrupting(link, timeout_s):
            end = accept(link, timeout_s)
            receive = end.recv

            def corrupt(data, timeout_s):
                receive(data, timeout_s)
                data[3] ^= 1

            end.recv = corrupt
            return end

        backend.accept = accept_corrupting
        await finish(pair)
        for worker in (pair.prefill, pair.decode):
            assert worker.events.ended_with(KEY).param == "checksum"
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


async def test_a_newer_link_frees_a_receive_that_waits_on_the_old_one(backends):
    """Decode posted for a sender that gave up: the next piece does not wait for that."""
    config = replace(PATIENT, op_timeout_s=30, connect_timeout_s=30)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=backends, config=config) as pair:
        await ready(pair)
        (grant,) = moves(pair.clients, "Grant")
        stuck = piece_of(pair, grant)
        pair.receiver.on_piece(stuck)
        await asyncio.sleep(0.05)
        pair.sender._channels.get(pair.decode.ref).renew(1)
        async with asyncio.timeout(60):
            await finish(pair)
        assert len(pair.decode.events.commits) == 1
