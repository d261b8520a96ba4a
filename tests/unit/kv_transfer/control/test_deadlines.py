"""Hand-offs that end by a timer, or live on because prefill answers for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from protocol.errors import DeadlineExceeded, ErrorCode, Unavailable
from rpc import methods
from tests.support.transfer import PATIENT, Pair, differing
from tests.support.transfer_steps import DEST, KEY, LAYOUT, SOURCE, finish, moves, ready


async def test_leases_end_by_themselves(memory):
    """No message but the first piece arrives any more: timers end the hand-off on both workers and
    free the blocks."""
    config = replace(PATIENT, lease_s=0.2, rpc_attempts=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def lose(address, method, request):
            if method is not methods.PIECE:
                raise Unavailable("refused", param="address")

        await ready(pair)
        pair.clients.intercept = lose
        pair.sender.push(KEY, SOURCE[:2], 0)
        for worker in (pair.prefill, pair.decode):
            await worker.events.wait(lambda e: e.is_over(KEY))
            assert "deadline" in worker.events.ended_with(KEY).message
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_a_granted_prompt_may_wait_in_prefills_queue(any_backends):
    """Far longer than the lease, which runs from the first piece: decode asks meanwhile."""
    config = replace(PATIENT, lease_s=0.2)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=any_backends, config=config) as pair:
        began = asyncio.get_running_loop().time()
        kv = await ready(pair)
        async with asyncio.timeout(60):
            while len(moves(pair.clients, "Grant")) <= 3:
                await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began >= 3 * config.lease_s
        assert pair.prefill.events.ends == pair.decode.events.ends == []
        pair.sender._config = pair.receiver._config = PATIENT  # for the pieces, now that they come
        await finish(pair)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_a_grant_ends_when_prefill_does_not_answer_for_it(memory):
    config = replace(PATIENT, lease_s=0.2, rpc_timeout_s=0.1, rpc_attempts=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:
        await ready(pair)
        del pair.clients.handlers[pair.prefill.ref.address]
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        assert pair.decode.events.safe == [(KEY, DEST)]


async def test_a_grant_ends_when_prefill_has_left_the_handoff(memory):
    """Its End message was lost: it refuses the grant when it is asked."""
    config = replace(PATIENT, lease_s=0.2, rpc_timeout_s=0.1, rpc_attempts=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory, config=config) as pair:

        async def lose(address, method, request):
            if method is methods.END:
                raise DeadlineExceeded("lost")

        await ready(pair)
        pair.clients.intercept = lose
        await pair.sender.end(KEY, True)
        await pair.decode.events.wait(lambda e: e.safe)
        assert "over" in pair.decode.events.ended_with(KEY).message


async def test_an_offer_that_is_never_granted_ends_with_its_ticket(memory):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        pair.submit(KEY, 5, ttl_s=0.2)
        for worker in (pair.prefill, pair.decode):
            await worker.events.wait(lambda e: e.is_over(KEY))
            assert worker.events.ended_with(KEY).code is ErrorCode.DEADLINE_EXCEEDED
        assert pair.decode.events.safe == []
