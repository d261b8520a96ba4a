"""Steps that the transfer tests share, between two test workers of one layout."""

from __future__ import annotations

import itertools

from protocol.errors import DeadlineExceeded
from protocol.ids import RequestKey
from protocol.messages import Piece
from tests.support.transfer import fill, make_layout, random_kv, reply_of

KEY, OTHER = RequestKey("a"), RequestKey("b")
SOURCE, DEST = (3, 1, 4, 9, 5), (8, 2, 7, 1, 15)
MORE, LAND = (6, 7), (3, 4)
LAYOUT = make_layout(2)


def moves(clients, name):
    return [request for method, request in clients.calls if method == name]


async def ready(pair, key=KEY, source=SOURCE, dest=DEST, seed=1):
    """Submit and grant; the source is filled."""
    kv = random_kv(LAYOUT, len(source), seed=seed)
    fill(pair.prefill.pools, LAYOUT, source, kv)
    pair.submit(key, len(dest))
    await pair.receiver.reserve(key, (dest,), 0)
    return kv


def disturb(pair, method, how):
    """Lose the first message of a method or its reply, or bring it twice; the list it is put in."""
    hit = []

    async def fault(address, name, request):
        if name is not method or hit:
            return
        hit.append(request)
        if how != "lost":
            await reply_of(pair.clients.handlers[address][name], request)
        if how != "twice":
            raise DeadlineExceeded("lost")

    pair.clients.intercept = fault
    return hit


_turns = itertools.count(1)


def piece_of(pair, grant, **fields):
    """All that the first hand-off moves, as one piece."""
    whole = {
        "key": KEY,
        "ticket": grant.ticket,
        "generation": grant.generation,
        "index": 0,
        "first_cell": 0,
        "num_cells": len(SOURCE),
        "first_layer": 0,
        "num_layers": LAYOUT.num_layers,
        "prefill": pair.prefill.ref,
        "prefill_layout": LAYOUT,
        "incarnation": 1,
        "turn": next(_turns),
    }
    return Piece(**(whole | fields))


async def finish(pair, key=KEY, source=SOURCE, first=0):
    pair.sender.push(key, source[first:], first)
    pair.sender.commit(key, (1,))
    await pair.prefill.events.wait(lambda e: e.is_over(key))
    await pair.decode.events.wait(lambda e: e.is_over(key))
