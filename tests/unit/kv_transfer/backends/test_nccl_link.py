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

from kv_transfer.backends import nccl
from kv_transfer.backends.base import LinkBroken
from kv_transfer.config import ChecksumKind
from kv_transfer.cuda import copying
from kv_transfer.cuda.nccl import Staging, Watch
from kv_transfer.plan import checksum
from tests.support import moves

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 4, 12, 2, 2, 4
PAGE = TOKENS * DIM * 2
BLOCK = 2 * HEADS * PAGE  # of one layer


class Device:
    """Streams of work that run in order, each as soon as what it waits for is over."""

    def __init__(self):
        self.changed = threading.Condition()
        self.streams = []
        self.current = None
        self.copies = 0

    def queue(self, stream, ready, run):
        with self.changed:
            stream.work.append((ready, run))
        self.step()

    def step(self):
        with self.changed:
            while any(stream.step() for stream in self.streams):
                pass
            self.changed.notify_all()

    def wait(self, over):
        with self.changed:
            assert self.changed.wait_for(over, 60)


class Stream:
    def __init__(self, priority=0):
        self.cuda_stream = len(DEVICE.streams)
        self.work = deque()
        DEVICE.streams.append(self)

    def step(self):
        if not self.work or not self.work[0][0]():
            return False
        self.work.popleft()[1]()
        return True

    def synchronize(self):
        DEVICE.wait(lambda: not self.work)


class Event:
    def __init__(self, **_):
        self.recorded = self.over = 0

    def record(self, stream):
        self.recorded += 1
        number = self.recorded
        DEVICE.queue(stream, lambda: True, lambda: setattr(self, "over", number))

    def hold(self, stream):
        number = self.recorded
        DEVICE.queue(stream, lambda: self.over >= number, lambda: None)

    def synchronize(self):
        number = self.recorded
        DEVICE.wait(lambda: self.over >= number)


class Wire:
    """Carries one message for each `pass_on`, once both sides have come to theirs."""

    def __init__(self):
        self.posts = {"send": deque(), "recv": deque()}
        self.waiting = {"send": deque(), "recv": deque()}
        self.open = 0
        self.gone = set()

    def pass_on(self, count):
        with DEVICE.changed:
            self.open += count
        DEVICE.step()

    def post(self, kind, address, size, stream):
        post = SimpleNamespace(address=address, size=size, there=False, over=False)
        self.posts[kind].append(post)

        def over():  # asked only once the stream has come to it
            if not post.there:
                post.there = True
                self.waiting[kind].append(post)
            self._carry()
            return post.over or kind in self.gone

        DEVICE.queue(DEVICE.streams[stream], over, lambda: None)

    def _carry(self):
        while self.open and all(self.waiting.values()) and not self.gone:
            self.open -= 1
            source, target = self.waiting["send"].popleft(), self.waiting["recv"].popleft()
            assert source.size == target.size
            ctypes.memmove(target.address, source.address, source.size)
            source.over = target.over = True

    def abort(self, kind):
        with DEVICE.changed:
            self.gone.add(kind)
        DEVICE.step()


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


DEVICE = Device()
CURRENT = threading.local()


@contextlib.contextmanager
def on(stream):
    CURRENT.stream = stream
    yield


def copy_rows(source, target, extent, *, kernel, stream, ctas, items):
    assert items == (1, 1)
    DEVICE.queue(DEVICE.streams[stream], lambda: True, lambda: copy_now(source, target, extent))


def copy_now(source, target, extent):
    DEVICE.copies += 1
    counts = (extent.num_layers, extent.num_cells, 2, extent.num_heads)
    for layer, cell, half, head in itertools.product(*map(range, counts)):
        ends = []
        for rows in (source, target):
            page = cell if rows.pages is None else page_number(rows.pages, cell)
            within = layer * rows.layer + page * rows.page + half * rows.half + head * rows.head
            ends.append(rows.address + within)
        ctypes.memmove(ends[1], ends[0], extent.cell_bytes)


def page_number(address, cell):
    return ctypes.c_int32.from_address(address + 4 * cell).value


def content_checksum(data, kind):
    CURRENT.stream.synchronize()
    return checksum.content_checksum(data, kind)


class Pages:
    def __init__(self, device):
        self.kept = []

    def load(self, stream, *pages):
        tensors = [torch.tensor(numbers, dtype=torch.int32) for numbers in pages]
        self.kept += tensors
        return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture
def links(monkeypatch):
    """(sender, receiver, wire, source pool, target pool), for messages of so many bytes."""
    monkeypatch.setattr(copying, "copy_rows", copy_rows)
    monkeypatch.setattr(nccl, "content_checksum", content_checksum)
    monkeypatch.setattr(nccl, "PageTable", Pages)
    DEVICE.streams.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(nccl, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", on)
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
                step_events=None,
            )
            staging = Staging(1 << 30, largest=chunk_bytes, count=nccl.BUFFERS)
            backend = SimpleNamespace(
                store=store,
                watch=Watch("test"),
                pool=copying.PoolCopies(store.data, kernel=None, ctas=1),
                staging=staging,
            )
            link = nccl.NcclLink("link", Group(wire, kind), backend, chunk_bytes)
            ends.append((link, data))
            made.append(link)
        return *(link for link, _ in ends), wire, *(data for _, data in ends)

    yield make
    for link in made:
        link.close()
        link._backend.watch.close()


def move(blocks, **changes):
    shape = {"block_size": TOKENS, "num_layers": LAYERS, "num_heads": HEADS}
    return moves.make_move(blocks, **shape | changes)


def in_thread(run):
    result = Future()

    def work():
        try:
            result.set_result(run())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result


@pytest.mark.parametrize(
    "chunk_bytes",
    [BLOCK, 2 * BLOCK, 5 * BLOCK, 5 * 3 * BLOCK, 99 * BLOCK],
    ids=["a block", "two blocks", "a layer", "three layers", "all"],
)
def test_messages_of_any_size_carry_the_same_bits(links, chunk_bytes):
    sender, receiver, wire, source, target = links(chunk_bytes)
    expected = target.clone()
    wire.pass_on(1000)
    sums = []
    for ids, peer, layers, kind in [
        ((3, 1, 4, 9, 5), (2, 6, 11, 8, 0), slice(0, 4), ChecksumKind.NONE),
        ((3, 1, 4, 9, 5), (11, 6, 2, 8, 0), slice(0, 4), ChecksumKind.SUM),
        ((3, 1, 4, 9, 5), (2, 6, 11, 8, 0), slice(0, 4), ChecksumKind.SUM),
        ((0, 2), (7, 1), slice(1, 3), ChecksumKind.CRC32),
    ]:
        size = {"first_layer": layers.start, "num_layers": layers.stop - layers.start}
        mine, theirs = move(ids, checksum=kind, **size), move(peer, checksum=kind, **size)
        sent = in_thread(lambda mine=mine: sender.send_blocks(mine, 10)())
        assert receiver.recv_blocks(theirs, 10)() == sent.result(60)
        assert (sent.result() == 0) == (kind is ChecksumKind.NONE)
        sums.append(sent.result())
        expected[layers][:, list(peer)] = source[layers][:, list(ids)]
        assert torch.equal(target, expected)
    assert sums[1] == sums[2]  # of this message alone


@pytest.mark.parametrize("chunk_bytes", [2 * BLOCK, 5 * 4 * BLOCK])
def test_moves_are_queued_ahead_of_the_wire(links, chunk_bytes):
    sender, receiver, wire, source, target = links(chunk_bytes)
    before = target.clone()
    pairs = [((0, 1, 2, 3), (4, 5, 6, 7)), ((8, 9), (1, 0)), ((10, 11), (2, 3))]
    ends = []
    for ids, peer in pairs:  # none of them blocks
        ends += [sender.send_blocks(move(ids), 10), receiver.recv_blocks(move(peer), 10)]
    assert torch.equal(target, before)
    assert len(wire.posts["send"]) == len(wire.posts["recv"])
    wire.pass_on(len(wire.posts["send"]))
    for end in ends:
        assert end() == 0
    for ids, peer in pairs:
        assert torch.equal(target[:, list(peer)], source[:, list(ids)])


def test_a_buffer_is_filled_again_only_after_it_has_left(links):
    sender, receiver, wire, *_ = links(BLOCK)
    DEVICE.copies = 0
    end = sender.send_blocks(move(range(5), num_layers=1), 10)
    assert DEVICE.copies == nccl.BUFFERS
    over = receiver.recv_blocks(move(range(5), num_layers=1), 10)
    wire.pass_on(1)
    assert DEVICE.copies == nccl.BUFFERS + 2  # one of each side
    wire.pass_on(4)
    end(), over()
    assert DEVICE.copies == 10


def test_a_link_is_aborted_from_its_device(links, monkeypatch):
    """NCCL goes back to the caller's device, which costs a context there."""
    sender, *_ = links(BLOCK)
    here, aborted = threading.local(), Future()

    @contextlib.contextmanager
    def at(device):
        here.device = device
        yield
        here.device = None

    monkeypatch.setattr(torch.cuda, "device", at)
    monkeypatch.setattr(sender, "_device", "its own")
    monkeypatch.setattr(
        sender._group, "abort", lambda: aborted.set_result(getattr(here, "device", "the first"))
    )
    sender.close()
    assert aborted.result(60) == "its own"


def test_only_so_much_is_queued(links, monkeypatch):
    monkeypatch.setattr(nccl, "_STRETCH", 2)
    monkeypatch.setattr(nccl, "_STRETCHES", 1)
    sender, receiver, wire, source, target = links(BLOCK)
    mine, theirs = move(range(9), num_layers=1), move(range(9), num_layers=1)
    begun = [
        in_thread(lambda: sender.send_blocks(mine, 10)),
        in_thread(lambda: receiver.recv_blocks(theirs, 10)),
    ]
    with pytest.raises(TimeoutError):
        begun[0].result(0.1)
    assert len(wire.posts["send"]) < 9
    wire.pass_on(9)
    for future in begun:
        future.result(60)()
    assert torch.equal(target[0, :9], source[0, :9])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_revoked_move_touches_nothing_and_keeps_the_ends_in_step(links, side):
    sender, receiver, wire, source, target = links(BLOCK)
    before = target.clone()
    sending, receiving = (move(range(3), num_layers=1) for _ in range(2))
    revoked = sending if side == "sender" else receiving
    assert revoked.access.revoke().done()
    ends = [sender.send_blocks(sending, 10), receiver.recv_blocks(receiving, 10)]
    wire.pass_on(3)
    for end in ends:
        end()
    if side == "receiver":
        assert torch.equal(target, before)
    ends = [sender.send_blocks(move([7]), 10), receiver.recv_blocks(move([9]), 10)]
    wire.pass_on(LAYERS)
    for end in ends:
        end()
    assert torch.equal(target[:, 9], source[:, 7])


def test_blocks_revoked_under_way_are_safe_once_the_wire_is_done(links):
    sender, receiver, wire, *_ = links(BLOCK)
    sending, receiving = (move(range(3), num_layers=1) for _ in range(2))
    ends = [sender.send_blocks(sending, 10), receiver.recv_blocks(receiving, 10)]
    safe = [sending.access.revoke(), receiving.access.revoke()]
    assert not any(future.done() for future in safe)
    wire.pass_on(3)
    for end, future in zip(ends, safe, strict=True):
        end()
        assert future.done()


@pytest.mark.parametrize("how", ["closed", "timed out"])
def test_whatever_waits_on_a_broken_link_ends(links, how):
    sender, receiver, *_ = links(BLOCK)
    timeout = 10 if how == "closed" else 0.2
    mine, theirs = move(range(8)), move(range(8))
    sent = in_thread(sender.send_blocks(mine, timeout))
    received = in_thread(receiver.recv_blocks(theirs, timeout))
    if how == "closed":
        with pytest.raises(TimeoutError):
            sent.result(0.1)
        sender.close()
        receiver.close()
    for future in (sent, received):
        with pytest.raises(LinkBroken):
            future.result(60)
    for touched in (mine, theirs):
        assert touched.access.revoke().done()
    assert not any(stream.work for stream in DEVICE.streams)
    late = move([1])
    with pytest.raises(LinkBroken):
        sender.send_blocks(late, 1)
    assert late.access.revoke().done()


def test_a_link_that_two_close_at_once_gives_its_buffers_back_once(links):
    sender, *_ = links(BLOCK)
    both = threading.Barrier(2)

    class Broken(threading.Event):
        def is_set(self):
            """Both ask before either says."""
            found = super().is_set()
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return found

    sender._broken = Broken()
    for closing in [in_thread(sender.close) for _ in range(2)]:
        closing.result(60)
    for thread in threading.enumerate():
        if thread.name.startswith("kv-abort"):
            thread.join(60)
    assert sender._backend.staging._left == (1 << 29) + BLOCK


def test_a_link_is_aborted_though_there_is_no_thread_for_it(links, refuse_threads):
    sender, *_ = links(BLOCK)
    mine = move(range(8))
    end = sender.send_blocks(mine, 10)
    refuse_threads(lambda name: name.startswith("kv-abort"))
    sender.close()
    assert sender._group._gone
    assert sender._backend.staging._left == (1 << 29) + BLOCK
    with pytest.raises(LinkBroken, match="was closed"):
        end()
    assert mine.access.revoke().done()
    assert not DEVICE.streams[sender._wire.cuda_stream].work


def test_links_share_a_budget_of_buffers():
    mib = 1 << 20
    staging = Staging(1024 * mib, largest=128 * mib, count=2, links=64)
    sizes = [staging.take(64) for _ in range(64)]
    assert sizes[:3] == [64 * mib, 32 * mib, 32 * mib]
    assert min(sizes) == 4 * mib
    assert 2 * sum(sizes) <= 1024 * mib
    more = [staging.take(64) for _ in range(200)]  # small ones, rather than more memory
    assert 2 * sum(sizes + more) <= 1025 * mib
    for size in sizes + more:
        staging.give(size)
    assert staging.take(64) == 64 * mib
    staging.shrink(32 * mib)
    staging.give(32 * mib)
    assert [staging.take(64) for _ in range(64)] == sizes
    assert Staging(0, largest=mib, count=2).take(3 * mib) == 3 * mib  # one message


def test_a_communicator_whose_link_finds_no_memory_is_aborted(monkeypatch):
    """Or its other end would wait for a first message."""

    def full(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(nccl, "NcclLink", full)
    group = Group(Wire(), "send")
    backend = object.__new__(nccl.NcclBackend)
    with pytest.raises(RuntimeError, match="out of memory"):
        backend._make_link("link", group, 1)
    assert group._gone
