"""Outputs that move off a worker which has another role now: whatever fails, the client gets every
token once, and nothing stays counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from observability import metrics
from protocol.errors import HandoffFailed, Overloaded
from protocol.ids import RequestKey, Role
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, until
from tests.support.stub_workers import StubFleet, StubWorker
from tests.unit.router.dispatch.test_sequence_run import expected, idle, ids_of, metric

COUNT = 40


@pytest.fixture
async def source(fleet: StubFleet) -> StubWorker:
    return await fleet.add(Role.DECODE, delay_s=0.01)


@pytest.fixture
async def front_ends(
    source: StubWorker, fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> AsyncIterator[FrontEnds]:
    """With one decode worker, on which everything starts."""
    async with make_front_ends(fleet) as front_ends:
        yield front_ends


async def begun(
    front_ends: FrontEnds, source: StubWorker, *, held: bool = False
) -> asyncio.Task[list[int]]:
    """`held`: it stands still there until it moves, however long that takes."""
    asked = asyncio.create_task(ids_of(front_ends, max_tokens=COUNT))
    await until(lambda: any(index >= 3 for index in source.next_index.values()))
    if held:
        source.gate = asyncio.Event()
    return asked


async def join(front_ends: FrontEnds, **settings: Any) -> StubWorker:
    target = await front_ends.fleet.add(Role.DECODE, **settings)
    front_ends.router.set_workers(front_ends.fleet.refs)
    await front_ends.wait_ready(2)
    return target


def moves(front_ends: FrontEnds, outcome: str) -> float:
    return metric(front_ends, metrics.MOVES, outcome=outcome)


@pytest.mark.parametrize("why", ["role", "left"])
async def test_an_output_moves_and_its_events_with_it(
    front_ends: FrontEnds, source: StubWorker, why: str
) -> None:
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends)
    if why == "left":
        front_ends.router.set_workers([target.ref])
    else:
        source.change(Role.PREFILL)
    assert await asked == expected(COUNT)
    (submit,), (request,) = target.submitted, source.moves
    assert submit.live
    assert submit.peer is not None
    assert submit.peer.worker_id == source.name
    assert submit.ticket == request.ticket
    assert (request.key.attempt, request.to) == (0, submit.key)
    assert (submit.key.attempt, request.num_output) == (1, len(submit.output_ids))
    assert submit.ticket.sender_epoch == source.epoch
    assert submit.ticket.receiver_epoch == target.epoch
    assert moves(front_ends, "moved") == 1
    assert metric(front_ends, metrics.RESUMES, cause="decode_lost") == 0
    await until(lambda: idle(front_ends))
    assert source.cancelled == target.cancelled == []
    if why == "left":
        await until(lambda: len(front_ends.router._workers.all()) == 1)


@pytest.mark.parametrize("how", ["refuses", "fails", "dies"])
async def test_a_move_that_fails_changes_nothing(
    front_ends: FrontEnds, source: StubWorker, how: str
) -> None:
    source.hands_over = False
    asked = await begun(front_ends, source)
    settings: dict[str, Any] = {"refuse": Overloaded("full")} if how == "refuses" else {}
    target = await join(front_ends, **settings)
    source.change(Role.PREFILL)
    if how != "refuses":
        await until(lambda: source.moves)
    if how == "fails":
        submit = target.submitted[0]
        target.fail_after = 0
        target.fail_error = HandoffFailed("refused")
        assert target._fails(submit, 0)
    elif how == "dies":
        await target.stop()
        await until(lambda: source.ends)
    assert await asked == expected(COUNT)
    assert moves(front_ends, "moved") == 0
    assert moves(front_ends, "failed") >= 1
    assert metric(front_ends, metrics.RESUMES, cause="decode_lost") == 0
    await until(lambda: idle(front_ends))
    told = [(end.key, end.epoch, end.to_sender, end.released) for end in source.ends]
    lost = source.moves if how == "dies" else []
    assert told == [(move.to, target.epoch, True, False) for move in lost]


async def test_a_worker_that_no_output_reaches_is_left_out_of_moves_for_a_while(
    front_ends: FrontEnds, source: StubWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the most room, so each try would go there."""
    monkeypatch.setattr("router.dispatch.moves._FIRST_PAUSE_S", 0.01)
    source.delay_s = 0.03
    asked = await begun(front_ends, source)
    await join(front_ends, refuse=HandoffFailed("its data port is closed"))
    source.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "failed") == 3)
    await asyncio.sleep(0.3)
    assert moves(front_ends, "failed") == 3
    target = await front_ends.fleet.add(Role.DECODE)
    front_ends.router.set_workers(front_ends.fleet.refs)
    assert await asked == expected(COUNT)
    assert (len(target.submitted), moves(front_ends, "moved")) == (1, 1)
    assert moves(front_ends, "failed") == 3
    await until(lambda: idle(front_ends))


async def test_a_worker_that_was_full_is_asked_until_it_has_room(
    front_ends: FrontEnds, source: StubWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.dispatch.moves._FIRST_PAUSE_S", 0.01)
    source.delay_s = 0.03
    asked = await begun(front_ends, source)
    target = await join(front_ends, refuse=Overloaded("full", retry_after_s=1.0))
    source.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "failed") == 4)
    target.refuse = None
    assert await asked == expected(COUNT)
    assert moves(front_ends, "moved") == 1
    await until(lambda: idle(front_ends))


@pytest.mark.parametrize("learned", ["before", "after"])
async def test_an_output_whose_new_worker_dies_before_its_first_token_is_resumed(
    front_ends: FrontEnds, source: StubWorker, learned: str
) -> None:
    """Its old worker has given it away: learned before the new one is lost, or after."""
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends, delay_s=30.0)
    source.tells_of_leaving = learned == "before"
    source.change(Role.PREFILL)
    await until(lambda: source.moves)
    source.gate = None
    await asyncio.sleep(0.02)
    await target.stop()
    if learned == "after":
        await until(lambda: moves(front_ends, "failed") == 1)
        source.tells_of_leaving = True
        (submit,) = source.submitted
        from protocol.messages import SpanEvent

        source._publish(submit, spans=(SpanEvent(key=submit.key, spans=()),))
    await until(lambda: metric(front_ends, metrics.RESUMES, cause="decode_lost") == 1)
    source.change(Role.DECODE)
    assert await asked == expected(COUNT)
    assert len(source.submitted) == 2
    assert source.submitted[1].key.attempt == 2
    await until(lambda: idle(front_ends))


async def test_the_loss_of_the_worker_that_an_output_has_left_is_no_loss(
    front_ends: FrontEnds, source: StubWorker
) -> None:
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends, delay_s=0.005)
    source.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "moved") == 1)
    await source.stop()
    assert await asked == expected(COUNT)
    assert len(target.submitted) == 1
    assert metric(front_ends, metrics.RESUMES, cause="decode_lost") == 0
    await until(lambda: idle(front_ends))


async def test_a_worker_that_has_given_its_outputs_away_may_go_before_they_go_on(
    front_ends: FrontEnds, source: StubWorker
) -> None:
    """It drains: nothing runs there any more, and the next worker's first token takes a step."""
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends, delay_s=0.3)
    source.change(Role.PREFILL)
    await until(lambda: source.moves)
    await asyncio.sleep(0.05)
    await source.stop()
    await until(lambda: moves(front_ends, "moved") == 1)
    target.delay_s = 0.0
    assert await asked == expected(COUNT)
    assert len(target.submitted) == 1
    assert metric(front_ends, metrics.RESUMES, cause="decode_lost") == 0
    await until(lambda: idle(front_ends))


async def test_an_output_moves_back_and_is_lost_there(
    front_ends: FrontEnds, source: StubWorker
) -> None:
    """What a worker said when an output left it for the first time does not count later."""
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends, gate=asyncio.Event())
    source.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "moved") == 1)
    source.gate = None
    source.change(Role.DECODE)
    target.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "moved") == 2)
    target.gate = None
    target.change(Role.DECODE)
    assert [submit.key.attempt for submit in source.submitted] == [0, 2]
    source.break_streams()
    assert await asked == expected(COUNT)
    assert metric(front_ends, metrics.RESUMES, cause="decode_lost") == 1
    await until(lambda: idle(front_ends))


@pytest.mark.parametrize("lost", [False, True])
async def test_a_moved_output_is_what_a_mended_worker_is_tried_with(
    front_ends: FrontEnds, source: StubWorker, lost: bool
) -> None:
    """Its first token there says that the worker is mended, not its last, minutes later."""
    asked = await begun(front_ends, source, held=True)
    gate = asyncio.Event()
    target = await join(front_ends, gate=gate)
    (client,) = (w for w in front_ends.router._workers.all() if w.ref == target.ref)
    clock = front_ends.router._service.clock
    for number in range(3):
        client.breaker.failed(RequestKey("other", number), clock() - 2.0)
    source.change(Role.PREFILL)
    await until(lambda: moves(front_ends, "moved") == 1)
    source.gate = None
    assert client.breaker.state == "closed"
    assert not asked.done()
    source.change(Role.DECODE)
    if lost:  # until an output has ended well there, one more failure is enough
        target.break_streams()
    gate.set()
    assert await asked == expected(COUNT)
    assert client.breaker.state == ("open" if lost else "closed")
    await until(lambda: idle(front_ends))


async def test_an_output_that_ends_before_its_worker_hears_of_the_move_leaves_nothing(
    front_ends: FrontEnds, source: StubWorker
) -> None:
    """The next worker holds blocks for it by then, and its worker cannot say that none come."""
    asked = await begun(front_ends, source)
    target = await join(front_ends, accepting=asyncio.Event())
    source.change(Role.PREFILL)
    await until(lambda: target.num_submits)
    assert await asked == expected(COUNT)
    target.accepting.set()
    await until(lambda: target.cancelled)
    assert [key.attempt for key in target.cancelled] == [1]
    assert source.moves == source.cancelled == []
    await until(lambda: idle(front_ends))


async def test_a_client_that_leaves_during_a_move_leaves_nothing(
    front_ends: FrontEnds, source: StubWorker
) -> None:
    source.hands_over = False
    asked = await begun(front_ends, source, held=True)
    target = await join(front_ends)
    source.change(Role.PREFILL)
    await until(lambda: source.moves)
    asked.cancel()
    await until(lambda: source.cancelled and target.cancelled)
    assert [key.attempt for key in (*source.cancelled, *target.cancelled)] == [0, 1]
    await until(lambda: idle(front_ends))


@pytest.mark.parametrize("settings", [{"weights": "other"}, {"free_blocks": 1}])
async def test_an_output_waits_for_a_worker_that_takes_its_kv_and_has_room(
    front_ends: FrontEnds, source: StubWorker, settings: dict[str, Any]
) -> None:
    asked = asyncio.create_task(ids_of(front_ends, max_tokens=400))
    await until(lambda: any(index >= 20 for index in source.next_index.values()))  # two blocks
    unfit = await join(front_ends, **settings)
    source.change(Role.PREFILL)
    await asyncio.sleep(0.05)
    fit = await front_ends.fleet.add(Role.DECODE)
    front_ends.router.set_workers(front_ends.fleet.refs)
    await until(lambda: moves(front_ends, "moved") == 1)
    assert await asked == 2 * expected(200)  # the script repeats itself
    assert (unfit.num_submits, fit.num_submits) == (0, 1)
    assert moves(front_ends, "failed") == 0
    await until(lambda: idle(front_ends))
