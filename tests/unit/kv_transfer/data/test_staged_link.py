"""Messages through a staging buffer, between pools that may hold numbers or e4m3 codes."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from kv_transfer.data.link_thread import StagedLink
from protocol.kv_layout import FP8_KV
from tests.support.moves import make_move
from tests.support.transfer import ToyPool, make_layout

LAYOUT = make_layout(1)
FLOATS = torch.float8_e4m3fn


class Wire:
    """Both ends of a link; `sent` is what is on its way."""

    def send(self, data, timeout_s):
        self.sent = data.clone()

    def recv(self, data, timeout_s):
        data.copy_(self.sent)


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        ("float32", "float32"),
        ("float32", FP8_KV),
        ("bfloat16", FP8_KV),
        (FP8_KV, "float32"),
        (FP8_KV, "bfloat16"),
        (FP8_KV, FP8_KV),
    ],
)
def test_codes_travel_where_either_pool_has_them(source, dest):
    """A pool of numbers gives and takes their e4m3 values, one of codes the codes themselves."""
    pools = [ToyPool(replace(LAYOUT, dtype=dtype), 0) for dtype in (source, dest)]
    generator = torch.Generator().manual_seed(1)
    numbers = (300.0 * torch.randn(pools[0].layers[0].shape, generator=generator)).bfloat16()
    numbers = numbers.float()
    codes = numbers.clamp(-448, 448).to(FLOATS)
    for layer in pools[0].layers:
        layer.copy_(codes.view(torch.uint8) if source == FP8_KV else numbers)
    wire, coded = Wire(), FP8_KV in (source, dest)
    places = {"block_size": 4, "num_layers": 2, "num_heads": 4, "coded": coded}
    StagedLink(wire, pools[0]).send_blocks(make_move((1, 5), **places), 1.0)
    StagedLink(wire, pools[1]).recv_blocks(make_move((7, 2), **places), 1.0)
    num_values = 2 * pools[0].layers[0][:2].numel()
    assert wire.sent.numel() == num_values * (1 if coded else pools[0].dtype.itemsize)
    expected = codes.float() if coded else numbers
    for layer in pools[1].layers:
        got = layer.view(FLOATS) if dest == FP8_KV else layer
        assert torch.equal(got[[7, 2]].float(), expected[[1, 5]])
        assert not layer[[0, 1, 3, 4, 5, 6]].any()


@pytest.mark.parametrize("how", ["revoked", "discarded"])
def test_a_message_that_counts_no_more_passes_the_link_and_touches_no_pool(how):
    """Its blocks may be another sequence's by now, but its peer waits for it."""
    wire, pool, touched = Wire(), ToyPool(LAYOUT, 0), []
    pool.before_gather = lambda: touched.append("read")
    pool.before_scatter = lambda: touched.append("written")
    for layer in pool.layers:
        layer.fill_(1.0)
    places = {"block_size": 4, "num_layers": 2, "num_heads": 4}
    moves = [make_move((blocks,), discard=how == "discarded", **places) for blocks in (1, 2)]
    if how == "revoked":
        assert all(move.access.revoke().done() for move in moves)
    link = StagedLink(wire, pool)
    link.send_blocks(moves[0], 1.0)()
    assert wire.sent.numel() == 2 * pool.layers[0][:1].numel() * 4
    assert touched == []
    link.recv_blocks(moves[1], 1.0)()
    assert touched == ([] if how == "revoked" else ["written"])
    assert all(move.access.revoke().done() for move in moves)
