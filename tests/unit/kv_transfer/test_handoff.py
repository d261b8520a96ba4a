"""Whole hand-offs over every backend: the contract suite."""

from __future__ import annotations

import pytest

from protocol.ids import RequestKey
from tests.support.transfer import Pair, differing, fill, make_layout, random_kv

KEY = RequestKey("a")
SIZES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize(("source_tp", "dest_tp"), SIZES)
async def test_every_pair_of_degrees_moves_the_same_bits(backends, source_tp, dest_tp):
    source, dest = make_layout(source_tp), make_layout(dest_tp)
    kv = random_kv(source, 5, seed=1)
    async with Pair(source=source, dest=dest, backends=backends) as pair:
        fill(pair.prefill.pools, source, (3, 1, 4, 9, 5), kv)
        await pair.run(KEY, (3, 1, 4, 9, 5), (8, 2, 7, 1, 15))
        assert differing(pair.decode.pools, dest, (8, 2, 7, 1, 15), kv) == []
        assert pair.sender.num_live == pair.receiver.num_live == 0
