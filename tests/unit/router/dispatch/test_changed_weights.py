"""Outputs in flight while workers with other weights take over."""

from __future__ import annotations

import asyncio

from protocol.ids import Role
from tests.support.router_front_ends import MakeFrontEnds, until
from tests.support.stub_workers import StubFleet
from tests.unit.router.dispatch.test_sequence_run import expected, ids_of


async def test_an_output_goes_on_with_the_weights_that_began_it(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """While the weights change, both kinds of worker are ready."""
    for weights in ("old", "old", "new", "new"):
        await fleet.add(Role.DECODE, weights=weights, fail_after=3, fail_attempts=1)
    async with make_front_ends(fleet) as front_ends:
        answers = await asyncio.gather(*(ids_of(front_ends) for _ in range(12)))
    assert answers == [expected(8)] * 12
    used: dict[str, set[str]] = {}
    for worker in fleet.workers:
        for submit in worker.submitted:
            used.setdefault(submit.key.request_id, set()).add(worker.weights)
    assert len(used) == 12
    assert all(len(weights) == 1 for weights in used.values())


async def test_an_output_goes_on_with_other_weights_when_its_own_are_gone(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE, weights="old", fail_after=3)
    async with make_front_ends(fleet) as front_ends:
        answer = asyncio.create_task(ids_of(front_ends))
        await until(lambda: fleet.workers[0].submitted)
        new = await fleet.add(Role.DECODE, weights="new")
        front_ends.router.set_workers([new.ref])
        assert await answer == expected(8)
    assert new.submitted[0].output_ids == tuple(expected(3))


async def test_an_output_that_began_before_its_submit_was_answered_keeps_its_weights(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """Though the worker with others has more room."""
    first = await fleet.add(Role.DECODE, weights="old", delay_s=0.1, answers_late=True)
    async with make_front_ends(fleet, submit_timeout_s=0.4) as front_ends:
        answer = asyncio.create_task(ids_of(front_ends))
        await until(lambda: first.submitted)
        alike = await fleet.add(Role.DECODE, weights="old", num_blocks=8)
        other = await fleet.add(Role.DECODE, weights="new")
        front_ends.router.set_workers(fleet.refs)
        assert await answer == expected(8)
    (submit,) = alike.submitted
    assert submit.output_ids == tuple(expected(8))[: len(submit.output_ids)]
    assert 0 < len(submit.output_ids) < 8
    assert not other.submitted


async def test_an_output_waits_for_the_last_worker_with_its_weights(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """That stands still for a while; one with others would take it at once."""
    lost = await fleet.add(Role.DECODE, weights="old", delay_s=0.1)
    async with make_front_ends(fleet, silence_s=4.0, submit_timeout_s=30.0) as front_ends:
        answer = asyncio.create_task(ids_of(front_ends))
        await until(lambda: lost.submitted)
        last = await fleet.add(Role.DECODE, weights="old", accepting=asyncio.Event())
        new = await fleet.add(Role.DECODE, weights="new")
        front_ends.router.set_workers(fleet.refs)
        clients = {client.ref: client for client in front_ends.router._workers.all()}
        await until(lambda: all(client.ready for client in clients.values()))
        await until(lambda: max(lost.next_index.values(), default=0) > 2)
        await lost.stop()
        await until(lambda: last.num_submits)
        last.silent = True
        await until(lambda: clients[last.ref].calls.still)
        await asyncio.sleep(0.3)  # the router looks each quarter of a second
        last.silent = False
        assert last.accepting is not None
        last.accepting.set()
        assert await answer == expected(8)
    (submit,) = last.submitted
    assert 0 < len(submit.output_ids) < 8
    assert not new.submitted
