"""The order of things on an nccl link, over a stand-in for CUDA and NCCL whose messages wait to be
let through."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.access import Access
from kv_transfer.backends import nccl
from kv_transfer.backends.base import BlockMove, LinkBroken
from kv_transfer.backends.watch import Watch
from kv_transfer.config import ChecksumKind
from protocol.kv_layout import Cells

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 4, 12, 2, 2, 4
PAGE = TOKENS * DIM * 2
BLOCK = 2 * HEADS * PAGE  # of one layer


STREAMS = {}


class Stream:
    def __init__(self, priority=0):
        self.cuda_stream = len(STREAMS)
        self.last = None
        STREAMS[self.cuda_stream] = self

    def wait_event(self, event):
        pass  # copies are over at once here


class Event:
    def __init__(self, **_):
        self.last = None

    def record(self, stream):
        self.last = stream.last

    def synchronize(self):
        if self.last is not None:
            self.last.result(10)


class Wire:
    """Carries one message for each `pass_on`, once both sides have posted."""

    def __init__(self):
        self.posts = {"send": deque(), "recv": deque()}
        self.lock = threading.Lock()
        self.open = 0

    def pass_on(self, count):
        with self.lock:
            self.open += count
            self._step()

    def post(self, kind, address, size, stream):
        done = Future()
        STREAMS[stream].last = done
        with self.lock:
            self.posts[kind].append((address, size, done))
            self._step()

    def _step(self):
        while self.open and all(self.posts.values()):
            self.open -= 1
            source, target = self.posts["send"].popleft(), self.posts["recv"].popleft()
            assert source[1] == target[1]
            ctypes.memmove(target[0], source[0], source[1])
            source[2].set_result(None)
            target[2].set_result(None)

    def abort(self, kind):
        with self.lock:
            while self.posts[kind]:
                self.posts[kind].popleft()[2].set_result(None)


class Group:
    """One end, which only sends or only receives."""

    def __init__(self, wire, kind):
        self._wire = wire
        self._kind = kind
        self._gone = False

    def send(self, address, size, stream, limit):
        if self._gone:
            raise RuntimeError("the communicator is gone")
        self._wire.post(self._kind, address, size, stream)

    recv = send

    def abort(self):
        self._gone = True
        self._wire.abort(self._kind)


def copy_rows(source, target, extent, *, ctas):
    counts = (extent.num_layers, extent.num_cells, 2, extent.num_heads)
    for layer, cell, half, head in itertools.product(*map(range, counts)):
        ends = []
        for rows in (source, target):
            page = cell if rows.pages is None else int(rows.pages[cell])
            within = layer * rows.layer + page * rows.page + half * rows.half + head * rows.head
            ends.append(rows.address + within)
        ctypes.memmove(ends[1], ends[0], extent.cell_bytes)


class Pages:
    def __init__(self, device):
        pass

    def load(self, *pages):
        return [torch.tensor(numbers) for numbers in pages]


@pytest.fixture
def links(monkeypatch):
    """(sender, receiver, wire, source pool, target pool), for messages of so many bytes."""
    monkeypatch.setattr(nccl, "copy_rows", copy_rows)
    monkeypatch.setattr(nccl, "PageTable", Pages)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    made = []

    def make(chunk_bytes):
        wire = Wire()
        ends = []
        for seed, kind in enumerate(("send", "recv")):
            generator = torch.Generator().manual_seed(seed)
            shape = (LAYERS, BLOCKS, 2, HEADS, TOKENS, DIM)
            data = torch.randint(-99, 99, shape, dtype=torch.int16, generator=generator)
            store = SimpleNamespace(
                data=data.view(torch.bfloat16),
                device=torch.device("cpu"),
                num_layers=LAYERS,
                num_heads=HEADS,
                block_size=TOKENS,
                head_dim=DIM,
                dtype=torch.bfloat16,
                marks=None,
            )
            backend = SimpleNamespace(store=store, watch=Watch("test"), copy_ctas=1)
            link = nccl.NcclLink("link", Group(wire, kind), backend, chunk_bytes)
            ends.append((link, data))
            made.append(link)
        return *(link for link, _ in ends), wire, *(data for _, data in ends)

    yield make
    for link in made:
        link.close()
        link._backend.watch.close()


def move(blocks, **changes):
    fields = {
        "cells": Cells(blocks=tuple(blocks), size=TOKENS, count=len(blocks)),
        "first_layer": 0,
        "num_layers": LAYERS,
        "first_head": 0,
        "num_heads": HEADS,
        "access": Access(),
        "checksum": ChecksumKind.SUM,
    }
    return BlockMove(**fields | changes)


def in_thread(run):
    result = Future()

    def work():
        try:
            result.set_result(run())
        except BaseException as error:  # noqa: BLE001 - for whoever asks
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result


def all_ends(parts):
    """Begin a move while another thread ends its parts, as a link's threads do; the sums."""
    ends = deque()
    ready = threading.Semaphore(0)

    def end_all():
        sums = []
        while True:
            ready.acquire(timeout=10)
            end = ends.popleft()
            if end is None:
                return sums
            sums.append(end())

    ending = in_thread(end_all)

    def begin_all():
        try:
            for end in parts:
                ends.append(end)
                ready.release()
        finally:
            ends.append(None)
            ready.release()
        return ending.result(10)

    return in_thread(begin_all)


@pytest.mark.parametrize(
    "chunk_bytes",
    [BLOCK, 2 * BLOCK, 5 * BLOCK, 5 * 3 * BLOCK, 99 * BLOCK],
    ids=["a block", "two blocks", "a layer", "three layers", "all"],
)
def test_messages_of_any_size_carry_the_same_bits(links, chunk_bytes):
    sender, receiver, wire, source, target = links(chunk_bytes)
    expected = target.clone()
    wire.pass_on(1000)
    for ids, peer, layers in [
        ((3, 1, 4, 9, 5), (2, 6, 11, 8, 0), slice(0, 4)),
        ((0, 2), (7, 1), slice(1, 3)),
    ]:
        size = {"first_layer": layers.start, "num_layers": layers.stop - layers.start}
        sent = all_ends(sender.send_blocks(move(ids, **size), 10))
        received = all_ends(receiver.recv_blocks(move(peer, **size), 10))
        assert sent.result(10) == received.result(10)
        expected[layers][:, list(peer)] = source[layers][:, list(ids)]
        assert torch.equal(target, expected)


def test_messages_of_later_moves_are_under_way_before_earlier_ones_are_over(links):
    sender, receiver, wire, source, target = links(5 * 4 * BLOCK)
    before = target.clone()
    pairs = [((0, 1, 2, 3), (4, 5, 6, 7)), ((8, 9), (1, 0)), ((10, 11), (2, 3))]
    ends = []
    for ids, peer in pairs:  # nothing ends yet, and none of them blocks
        ends += [*sender.send_blocks(move(ids), 10), *receiver.recv_blocks(move(peer), 10)]
    assert [len(posts) for posts in wire.posts.values()] == [3, 3]
    wire.pass_on(3)
    assert torch.equal(target, before)  # received, and touched by nobody
    for end in ends:
        end()
    for ids, peer in pairs:
        assert torch.equal(target[:, list(peer)], source[:, list(ids)])


def test_a_full_link_waits_for_its_oldest_message(links):
    sender, receiver, wire, source, target = links(BLOCK)
    first = in_thread(lambda: [*sender.send_blocks(move(range(4), num_layers=1), 10)])
    second = all_ends(receiver.recv_blocks(move(range(4), num_layers=1), 10))
    with pytest.raises(TimeoutError):
        first.result(0.1)
    assert len(wire.posts["send"]) == 3
    wire.pass_on(4)
    sender._slots[0].free.release()  # what the first End does
    assert len(first.result(10)) == 4
    second.result(10)
    assert torch.equal(target[0, :4], source[0, :4])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_revoked_move_touches_nothing_more_and_keeps_the_ends_in_step(links, side):
    sender, receiver, wire, source, target = links(BLOCK)
    before = target.clone()
    sending, receiving = (move(range(3), num_layers=1) for _ in range(2))
    sent, received = sender.send_blocks(sending, 10), receiver.recv_blocks(receiving, 10)
    wire.pass_on(1)
    for end in [next(sent), next(received)]:
        end()
    revoked = sending if side == "sender" else receiving
    assert revoked.access.revoke().done()
    rest = all_ends(sent), all_ends(received)
    wire.pass_on(2)
    for future in rest:
        future.result(10)
    assert torch.equal(target[0, 0], source[0, 0])
    if side == "receiver":
        assert torch.equal(target[0, 1:], before[0, 1:])
    again = (
        all_ends(sender.send_blocks(move([7]), 10)),
        all_ends(receiver.recv_blocks(move([9]), 10)),
    )
    wire.pass_on(LAYERS)
    for future in again:
        future.result(10)
    assert torch.equal(target[:, 9], source[:, 7])


@pytest.mark.parametrize("how", ["closed", "timed out"])
def test_whatever_waits_on_a_broken_link_ends(links, how):
    sender, receiver, _, _, target = links(BLOCK)
    before = target.clone()
    timeout = 10 if how == "closed" else 0.2
    mine, theirs = move(range(8)), move(range(8))
    sent = all_ends(sender.send_blocks(mine, timeout))
    received = all_ends(receiver.recv_blocks(theirs, timeout))
    if how == "closed":
        with pytest.raises(TimeoutError):
            sent.result(0.1)
        sender.close()
        receiver.close()
    for future in (sent, received):
        with pytest.raises(LinkBroken):
            future.result(5)
    for touched in (mine, theirs):
        assert touched.access.revoke().done()
    assert torch.equal(target, before)
    with pytest.raises(LinkBroken):
        next(iter(sender.send_blocks(move([1]), 1)))
