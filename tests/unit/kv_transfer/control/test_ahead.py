"""Pushes that are ahead of the engine: the step that fills their blocks still runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kv_transfer.plan import reshard
from protocol.errors import ErrorCode, Internal
from protocol.ids import RequestKey
from rpc import methods
from tests.support.one_sided import OneSidedBackend, OneSidedHub
from tests.support.transfer import Pair, differing, make_layout, random_kv

KEY = RequestKey("a")
SOURCE, DEST = (3, 1, 4, 9, 5), (8, 2, 7, 1, 15)
LAYOUT = make_layout(2, num_layers=5)
STEP = 7


class Marks:
    """An engine that writes layer after layer when it is told to."""

    def __init__(self, layout):
        self._layout = layout
        self._changed = threading.Condition()
        self._written = 0

    def write(self, num_layers):
        with self._changed:
            self._written += num_layers
            self._changed.notify_all()

    def wait(self, step, layer):
        if step != STEP:
            raise Internal(f"step {step} was not launched")
        with self._changed:
            assert self._changed.wait_for(lambda: self._written > layer, 60)

    follow = wait

    def is_over(self, step):
        return self._written == self._layout.num_layers


@pytest.fixture(params=["memory", "one-sided"])
def ways(request, memory):
    hub = OneSidedHub()
    return memory if request.param == "memory" else lambda: OneSidedBackend(hub)


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(reshard, "_GROUP_BYTES", 1)


async def running(pair, after=STEP):
    """A hand-off whose blocks are pushed, with the engine before its first layer."""
    marks = Marks(LAYOUT)
    for pool in pair.prefill.pools:
        pool.step_events = marks
    pair.submit(KEY, len(DEST))
    await pair.receiver.reserve(KEY, (DEST,), 0)
    pair.sender.push(KEY, SOURCE, 0, after=after)
    return marks


def called(pair):
    return [request for name, request in pair.clients.calls if name == methods.PIECE.name]


@pytest.mark.usefixtures("small_groups")
async def test_layers_leave_behind_the_step_and_the_commit_behind_them(ways):
    kv = random_kv(LAYOUT, 5, seed=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=ways) as pair:
        marks = await running(pair)
        pair.sender.commit(KEY, (3,))
        for layer in range(LAYOUT.num_layers):
            await asyncio.sleep(0.05)
            assert pair.decode.events.commits == []
            assert all(p.first_layer + p.num_layers <= layer for p in called(pair))
            for pool, (first, last) in zip(pair.prefill.pools, LAYOUT.rank_heads, strict=True):
                pool.layers[layer][list(SOURCE)] = kv[layer, :, :, first:last]
            marks.write(1)
        await pair.decode.events.wait(lambda e: e.is_over(KEY))
        assert pair.decode.events.commits[0][1].tokens == (3,)
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []
        groups = [(p.first_layer, p.num_layers) for p in called(pair)]
        assert groups in ([], [(0, 3), (3, 1), (4, 1)])


async def test_every_rank_waits_for_its_own_step(memory):
    """Commands run in order with steps, but a step's KV is there only later."""
    kv = random_kv(LAYOUT, 5, seed=1)
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=memory) as pair:
        first = await running(pair)
        last = pair.prefill.pools[1].step_events = Marks(LAYOUT)
        pair.sender.commit(KEY, (3,))
        for rank, marks in enumerate((first, last)):
            await asyncio.sleep(0.05)
            assert pair.decode.events.commits == []
            heads = slice(*LAYOUT.rank_heads[rank])
            for layer in range(LAYOUT.num_layers):
                pair.prefill.pools[rank].layers[layer][list(SOURCE)] = kv[layer, :, :, heads]
            marks.write(LAYOUT.num_layers)
        await pair.decode.events.wait(lambda e: e.is_over(KEY))
        assert differing(pair.decode.pools, LAYOUT, DEST, kv) == []


async def test_a_handoff_may_end_while_its_step_runs(ways):
    """Its source blocks are free only when nothing waits to read them any more."""
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=ways) as pair:
        marks = await running(pair)
        await asyncio.sleep(0.05)
        leaving = asyncio.create_task(pair.sender.end(KEY, True))
        await asyncio.sleep(0.05)
        if not leaving.done():  # a write is queued behind the step
            assert pair.prefill.events.ends == pair.decode.events.safe == []
        marks.write(LAYOUT.num_layers)
        await asyncio.wait_for(leaving, 60)
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.decode.events.ended_with(KEY) is None
        assert pair.decode.events.commits == []


async def test_a_step_that_was_not_launched_fails_the_handoff(ways):
    async with Pair(source=LAYOUT, dest=LAYOUT, backends=ways) as pair:
        await running(pair, after=STEP + 1)
        await pair.decode.events.wait(lambda e: e.safe)
        assert pair.prefill.events.ended_with(KEY).code is ErrorCode.HANDOFF_FAILED
        assert pair.decode.events.safe == [(KEY, DEST)]


@pytest.mark.parametrize("layers", [1, 2, 5, 32, 80])
@pytest.mark.parametrize("mib", [0.1, 1, 8, 64])
def test_groups_shrink_towards_the_last_layer(layers, mib):
    groups = reshard.layer_groups(layers, int(mib * (1 << 20)))
    assert sum(groups) == layers
    assert groups == sorted(groups, reverse=True)
    assert all(count * mib >= 16 for count in groups[1:])
    assert groups[-1] * mib < 48 or groups[-1] == 1
