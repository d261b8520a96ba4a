"""Links that are built before the first hand-off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.backends.base import LinkBroken
from protocol.errors import DeadlineExceeded, Unavailable
from protocol.ids import RequestKey
from rpc import methods
from tests.support.one_sided import OneSidedBackend, OneSidedHub
from tests.support.transfer import PATIENT, Pair, differing, fill, make_layout, random_kv

KEY = RequestKey("a")
SOURCE, DEST = (3, 1, 4), (8, 2, 7)
TP1, TP2, TP4 = (make_layout(size) for size in (1, 2, 4))


def connects(pair):
    """The links that prefill connects from here on."""
    found = []
    for plane in pair.prefill.planes:
        for backend in plane._backends.values():
            backend.connect = counted(backend.connect, found)
    return found


def counted(connect, found):
    def run(link, *rest):
        found.append(str(link))
        return connect(link, *rest)

    return run


async def hand_over(pair):
    kv = random_kv(pair.prefill.layout, len(SOURCE), seed=1)
    fill(pair.prefill.pools, pair.prefill.layout, SOURCE, kv)
    await pair.run(KEY, SOURCE, DEST)
    assert differing(pair.decode.pools, pair.decode.layout, DEST, kv) == []


@pytest.mark.parametrize(("source", "dest", "count"), [(TP1, TP1, 1), (TP2, TP4, 4), (TP4, TP1, 4)])
async def test_the_first_handoff_finds_its_links(backends, source, dest, count):
    async with Pair(source=source, dest=dest, backends=backends) as pair:
        made = connects(pair)
        await pair.sender.warm_up(pair.decode.ref)
        assert len(made) == count
        await pair.sender.warm_up(pair.decode.ref)
        await hand_over(pair)
        assert len(made) == count
        assert pair.sender.stats.relinked == pair.receiver.stats.relinked == 0


async def test_a_one_sided_link_needs_nothing_of_decode():
    hub = OneSidedHub()
    async with Pair(source=TP2, dest=TP2, backends=lambda: OneSidedBackend(hub)) as pair:
        made = connects(pair)
        await pair.sender.warm_up(pair.decode.ref)
        await pair.sender.warm_up(pair.decode.ref)  # heard of once more
        assert [name for name, _ in pair.clients.calls] == ["OpenLinks"]
        await hand_over(pair)
        assert len(made) == 2


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [Unavailable, DeadlineExceeded])
async def test_a_warm_up_that_fails_costs_no_handoff(backends, which, error):
    config = replace(PATIENT, connect_timeout_s=0.3)
    async with Pair(source=TP1, dest=TP2, backends=backends, config=config) as pair:
        calls = []

        async def lose(address, method, request):
            if method is methods.OPEN_LINKS:
                calls.append(request)
                if len(calls) == which + 1:
                    raise error("lost")

        pair.clients.intercept = lose
        await pair.sender.warm_up(pair.decode.ref)
        assert len(calls) == which + 1
        await hand_over(pair)


async def test_a_rank_that_cannot_connect_costs_no_handoff(backends):
    config = replace(PATIENT, connect_timeout_s=0.3)
    async with Pair(source=TP1, dest=TP1, backends=backends, config=config) as pair:
        (backend,) = pair.prefill.planes[0]._backends.values()
        connect = backend.connect

        def fail(*_):
            raise LinkBroken("no way")

        backend.connect = fail
        await pair.sender.warm_up(pair.decode.ref)
        assert pair.sender.stats.relinked == 1
        backend.connect = connect
        await hand_over(pair)


async def test_another_shape_is_refused(backends):
    other = make_layout(1, head_dim=16)
    async with Pair(source=other, dest=TP1, backends=backends) as pair:
        await pair.sender.warm_up(pair.decode.ref)
        assert [plane.open_backends for plane in pair.prefill.planes] == [set()]
        assert [plane.open_backends for plane in pair.decode.planes] == [set()]
