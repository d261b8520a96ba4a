"""An nccl link between two pools of one GPU: real streams, events, copies and buffers; only NCCL's
messages, which two ranks of one GPU cannot exchange, are copies on the same streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import pytest
import torch

from engine.kv.pool import KVPool
from kv_transfer.backends import nccl
from kv_transfer.config import ChecksumKind
from kv_transfer.cuda.copying import PoolCopies, load_copies
from kv_transfer.cuda.nccl import Staging, Watch
from tests.support import moves
from tests.support.transfer import make_layout

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 6, 4, 16, 64, 24
BLOCK = 2 * HEADS * TOKENS * DIM * 2  # bytes of one layer
LIMIT_S = 20


class Wire:
    """Pairs messages in their order. A post waits for that of the other side, as NCCL's kernel
    would on the device."""

    def __init__(self):
        self.sent, self.taken = Queue(), Queue()

    def send(self, address, size, stream, limit):
        ready = torch.cuda.Event()
        ready.record(torch.cuda.ExternalStream(stream))
        self.sent.put((address, size, ready))
        torch.cuda.ExternalStream(stream).wait_event(self.taken.get(timeout=LIMIT_S))

    def recv(self, address, size, stream, limit):
        source, sent, ready = self.sent.get(timeout=LIMIT_S)
        assert sent == size
        on = torch.cuda.ExternalStream(stream)
        on.wait_event(ready)
        over = torch.cuda.Event()
        with torch.cuda.stream(on):
            view(address, size).copy_(view(source, size))
            over.record(on)
        self.taken.put(over)

    def abort(self):
        pass


def view(address, size):
    """Bytes of the device as a tensor."""
    interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def make_pool(device, seed):
    layout = make_layout(
        1,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_size=TOKENS,
        num_blocks=BLOCKS,
        dtype="bfloat16",
    )
    pool = KVPool(layout, 0, torch.bfloat16, device)
    generator = torch.Generator(device).manual_seed(seed)
    bits = torch.randint(
        -99, 99, pool.data.shape, dtype=torch.int16, device=device, generator=generator
    )
    pool.data.view(torch.int16).copy_(bits)
    torch.cuda.synchronize()
    return pool


@pytest.fixture
def ends(device):
    """(sender, receiver) for messages of so many bytes, with their pools."""
    made = []

    def make(chunk_bytes):
        wire = Wire()
        for seed in (1, 2):
            pool = make_pool(device, seed)
            backend = SimpleNamespace(
                store=pool,
                watch=Watch("test"),
                pool=PoolCopies(pool.data, kernel=load_copies(device), ctas=16),
                staging=Staging(1 << 30, largest=chunk_bytes, count=nccl.BUFFERS),
            )
            link = nccl.NcclLink("link", wire, backend, chunk_bytes)
            made.append((link, pool, backend))
        return made

    yield make
    for link, _, backend in made:
        link.close()
        backend.watch.close()


def make_move(blocks, **changes):
    shape = {"block_size": TOKENS, "num_layers": LAYERS, "num_heads": HEADS}
    return moves.make_move(blocks, **shape | changes)


def carry(ends, pairs):
    """Both sides queue all moves before either waits; what each move's two sums were."""

    def run(link, begin, moves):
        over = [begin(link)(move, LIMIT_S) for move in moves]
        return [end() for end in over]

    (sender, *_), (receiver, *_) = ends
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(run, sender, lambda link: link.send_blocks, [a for a, _ in pairs])
        got = threads.submit(run, receiver, lambda link: link.recv_blocks, [b for _, b in pairs])
        return list(zip(sent.result(60), got.result(60), strict=True))


@pytest.mark.parametrize("chunk_bytes", [BLOCK, 3 * BLOCK, 5 * 2 * BLOCK, 99 * BLOCK])
def test_messages_of_any_size_carry_the_same_bits(ends, chunk_bytes):
    ends = ends(chunk_bytes)
    (_, source, _), (_, target, _) = ends
    expected = target.data.clone()
    pairs = []
    for ids, peer, layers, heads, kind in [
        ((3, 1, 4, 9, 5), (2, 6, 11, 8, 0), slice(0, 6), slice(0, 4), ChecksumKind.NONE),
        ((0, 2, 23), (7, 1, 22), slice(1, 5), slice(1, 3), ChecksumKind.SUM),
        ((10,), (12,), slice(5, 6), slice(3, 4), ChecksumKind.CRC32),
    ]:
        place = {
            "first_layer": layers.start,
            "num_layers": layers.stop - layers.start,
            "first_head": heads.start,
            "num_heads": heads.stop - heads.start,
            "checksum": kind,
        }
        pairs.append((make_move(ids, **place), make_move(peer, **place)))
        picked = source.data[layers][:, list(ids), :, heads]
        expected[layers, :, :, heads][:, list(peer)] = picked
    sums = carry(ends, pairs)
    assert sums[0] == (0, 0)
    assert all(mine == theirs != 0 for mine, theirs in sums[1:])
    assert torch.equal(target.data.view(torch.int16), expected.view(torch.int16))


def test_layers_leave_behind_the_step_that_writes_them(ends, device):
    ends = ends(3 * BLOCK)
    (_, source, _), (_, target, _) = ends
    marks, stream = source.step_events, torch.cuda.Stream(device)
    written = torch.full_like(source.data, 7.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        marks.begin()
        for layer in range(LAYERS):
            torch.cuda._sleep(20_000_000)
            source.data[layer].copy_(written[layer])
            marks.mark(layer)
        step = marks.end()
    pair = make_move(range(6), after=step), make_move(range(6, 12))
    assert carry(ends, [pair]) == [(0, 0)]
    assert torch.equal(target.data[:, 6:12], written[:, 6:12])
