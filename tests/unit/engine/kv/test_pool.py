"""Slices of a pool go out and come in where they belong."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from engine.kv.pool import KVPool, StepEvents
from protocol.errors import Internal
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


class Device:
    """A queue of writes, of which so many are over; events are places in it."""

    def __init__(self):
        self.queued, self.num_over = [], 0

    def event(self, **_):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.place = device, 0

    def record(self):
        self.place = len(self.device.queued)

    def query(self):
        return self.device.num_over >= self.place

    def synchronize(self):
        self.device.num_over = max(self.device.num_over, self.place)


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_for_a_layer_of_a_step_finds_it_written(seed, monkeypatch):
    """And waits for no later step, nor for layers behind the next mark."""
    random, device, num_layers = Random(seed), Device(), 5
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    events, ends, marks = StepEvents(num_layers), {}, {}
    for number in range(1, 60):
        events.begin()
        marks[number] = {}
        marked = random.choice([set(), set(range(num_layers)), {1, 3}])
        for layer in range(num_layers):
            device.queued.append((number, layer))
            if layer in marked:
                events.mark(layer)
                marks[number][layer] = len(device.queued)
        assert events.end() == number
        ends[number] = len(device.queued)
        two_before = ends.get(number - 2, 0)  # no more than two steps are in flight
        device.num_over = random.randint(max(device.num_over, two_before), ends[number])
        for _ in range(3):
            step, layer = random.randint(1, number), random.randrange(num_layers)
            wanted = {(step, each) for each in range(layer + 1)}
            later = (at for each, at in marks[step].items() if each >= layer)
            place = min(later, default=ends[step])
            before, seen = device.num_over, []
            stream = SimpleNamespace(wait_event=lambda event, seen=seen: seen.append(event.place))
            assert events.is_over(step) == (device.num_over >= ends[step])
            events.follow(stream, step, layer)
            assert seen == [place] if step > number - 2 else max(seen, default=0) <= place
            events.wait(step, layer)
            assert wanted <= set(device.queued[: device.num_over])
            assert device.num_over == max(before, place)
    device.num_over = len(device.queued)
    assert all(map(events.is_over, ends))
    with pytest.raises(Internal, match="step 60 was not launched"):
        events.is_over(60)
