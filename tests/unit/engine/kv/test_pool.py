"""Slices of a pool go out and come in where they belong."""

from __future__ import annotations

import pytest
import torch

from engine.kv.pool import KVPool
from protocol.kv_layout import Cells, KVLayout


def make_pool(rank: int = 0, block_size: int = 2, dtype: str = "float32") -> KVPool:
    layout = KVLayout(
        num_layers=3,
        num_kv_heads=4,
        head_dim=4,
        block_size=block_size,
        num_blocks=6,
        dtype=dtype,
        rank_heads=((0, 4), (1, 3)),
    )
    return KVPool(layout, rank, getattr(torch, dtype), torch.device("cpu"))


def test_a_rank_holds_its_heads_and_starts_with_zeros():
    pool = make_pool(1)
    assert pool.data.shape == (3, 6, 2, 2, 2, 4)
    assert pool.num_heads == 2
    assert not pool.data.any()
    assert pool.layers[1].data_ptr() == pool.data[1].data_ptr()


def whole(blocks):
    return Cells(blocks=tuple(blocks), size=make_pool().block_size, count=len(blocks))


@pytest.mark.parametrize("heads", [range(4), range(1, 3), range(3, 4)])
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
@pytest.mark.parametrize("given_out", [False, True])
def test_gather_copies_the_named_slice(heads, layers, given_out):
    pool = make_pool()
    pool.data.copy_(torch.randn(pool.data.shape))
    blocks = [5, 0, 3]
    expected = pool.data[layers.start : layers.stop][:, blocks, :, heads.start : heads.stop]
    out = torch.empty_like(expected) if given_out else None
    got = pool.gather(whole(blocks), layers, heads, out)
    assert got.is_contiguous()
    assert torch.equal(got, expected)
    assert not given_out or got is out


def test_codes_of_one_byte_move_as_bytes():
    source, target = make_pool(dtype="float8_e4m3fn"), make_pool(dtype="float8_e4m3fn")
    for layer in source.layers:
        layer.copy_(torch.randn(layer.shape))
    moved = source.gather(whole([4, 1]), range(3), range(4))
    assert moved.dtype is source.dtype is torch.uint8
    target.scatter(whole([4, 1]), range(3), range(4), moved)
    for ours, theirs in zip(source.layers, target.layers, strict=True):
        assert torch.equal(ours[[4, 1]].float(), theirs[[4, 1]].float())
    assert source.data.nbytes * 4 == make_pool().data.nbytes


@pytest.mark.parametrize("heads", [range(4), range(1, 3)])
@pytest.mark.parametrize("layers", [range(3), range(2, 3)])
def test_scatter_writes_the_named_slice_and_nothing_else(heads, layers):
    source, target = make_pool(), make_pool()
    source.data.copy_(torch.randn(source.data.shape))
    blocks = [4, 1]
    target.scatter(whole(blocks), layers, heads, source.gather(whole(blocks), layers, heads))
    expected = torch.zeros_like(source.data)
    for layer in layers:
        for block in blocks:
            part = source.data[layer, block, :, heads.start : heads.stop]
            expected[layer, block, :, heads.start : heads.stop] = part
    assert torch.equal(target.data, expected)


@pytest.mark.parametrize("heads", [range(4), range(1, 3)])
@pytest.mark.parametrize(("size", "first", "count"), [(2, 1, 4), (2, 0, 2), (1, 3, 9), (4, 0, 3)])
def test_cells_are_the_tokens_of_the_row_that_blocks_make(heads, size, first, count):
    source, target = make_pool(block_size=4), make_pool(block_size=4)
    source.data.copy_(torch.randn(source.data.shape))
    layers, blocks, peer_blocks = range(1, 3), (4, 1, 5), (0, 2, 3)
    cells = Cells.within(blocks, source.block_size, size=size, first=first, count=count)
    got = source.gather(cells, layers, heads)
    assert got.shape == (2, count, 2, len(heads), size, source.head_dim)
    row = row_of(source, blocks)[1:3, :, heads.start : heads.stop]
    tokens = slice(first * size, (first + count) * size)
    assert torch.equal(got.permute(0, 2, 3, 1, 4, 5).flatten(3, 4), row[:, :, :, tokens])
    to = Cells.within(peer_blocks, source.block_size, size=size, first=first, count=count)
    target.scatter(to, layers, heads, got)
    expected = torch.zeros_like(row_of(source, blocks))
    expected[1:3, :, heads.start : heads.stop, tokens] = row[:, :, :, tokens]
    assert torch.equal(row_of(target, peer_blocks), expected)
    assert target.data.count_nonzero() == expected.count_nonzero()


def row_of(pool, blocks):
    """`[layer, k/v, head, token, head_dim]` of a whole sequence."""
    return pool.data[:, list(blocks)].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
