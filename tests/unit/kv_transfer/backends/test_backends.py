"""The contract of links and rendezvous, without workers."""

from __future__ import annotations

import socket
import struct
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.backends.base import LinkBroken, LinkId
from kv_transfer.backends.choice import build_backends
from kv_transfer.backends.gloo import GlooBackend
from kv_transfer.backends.pool_access import PoolAccess
from kv_transfer.config import BackendName, ChecksumKind, TransferConfig
from kv_transfer.data import data_plane
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.link_threads import LinkThread, Moving, Operation, Waiters, nothing
from kv_transfer.data.rank_commands import MoveCommand, Part, PartResult, RankCommand, ReadyCommand
from kv_transfer.plan.checksum import combine, message_checksum
from protocol.errors import BatonError
from protocol.kv_layout import Cells
from tests.support.held import Held
from tests.support.memory_links import MemoryBackend, MemoryHub
from tests.support.transfer import make_layout, make_pools, submitted


def link_id(link=1):
    return LinkId(sender_epoch=1, receiver_epoch=2, source_rank=0, dest_rank=3, link=link)


@pytest.fixture
def ends(backends):
    """The two ends of one link, built at the same time."""
    source, dest = backends(), backends()
    endpoint = dest.listen()
    assert dest.listen() == endpoint
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 5.0)
        connecting = pool.submit(source.connect, link_id(), endpoint, 5.0)
        pair = connecting.result(5), accepting.result(5)
    yield pair
    for end in pair:
        end.close()
        end.close()
    dest.close()
    dest.close()


def data(value, size=1 << 16):
    return torch.full((size,), value, dtype=torch.uint8)


def small_move(sequence=0, num_peers=1):
    return MoveCommand(
        rank=0,
        sender_epoch=1,
        receiver_epoch=2,
        link=1,
        generation=1,
        sequence=sequence,
        cells=Cells(blocks=(0,), size=4, count=1),
        first_layer=0,
        num_layers=1,
        parts=tuple(Part(peer_rank=rank, first_head=0, num_heads=1) for rank in range(num_peers)),
    )


def test_messages_arrive_in_order(ends):
    source, dest = ends
    got = [data(0), data(0, 5), data(0)]
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(lambda: [source.send(m, 5.0) for m in (data(1), data(2, 5), data(3))])
        receiving = pool.submit(lambda: [dest.recv(m, 5.0) for m in got])
        sending.result(5)
        receiving.result(5)
    assert [int(m[0]) for m in got] == [1, 2, 3]
    assert all(torch.equal(m, m[:1].expand_as(m)) for m in got)


def test_a_receive_times_out_and_breaks_the_link(ends):
    source, dest = ends
    started = time.monotonic()
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 0.2)
    assert time.monotonic() - started < 10
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 5.0)
    with pytest.raises(LinkBroken):
        for _ in range(3):  # the first may still fit the network's buffers
            source.send(data(1, 1 << 22), 2.0)


@pytest.mark.parametrize("size", [1 << 15, 1 << 17])
def test_a_message_of_another_size_breaks_the_link_and_nothing_else(ends, size):
    source, dest = ends
    got = data(7, size)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(source.send, data(1), 0.5)
        with pytest.raises(LinkBroken):
            dest.recv(got, 0.5)
        sending.exception(5)  # its bytes may have been taken by the network
    assert torch.equal(got, data(7, size))


@pytest.mark.parametrize("which", ["own", "other"])
def test_close_wakes_a_blocked_receive(ends, which):
    source, dest = ends
    threading.Timer(0.2, (dest if which == "own" else source).close).start()
    started = time.monotonic()
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 30.0)
    assert time.monotonic() - started < 20


def test_a_send_that_nobody_takes_ends_in_time(ends):
    source, _ = ends
    started = time.monotonic()
    with pytest.raises(LinkBroken):
        source.send(data(1, 64 << 20), 0.3)
    assert time.monotonic() - started < 10


def test_ends_that_never_meet_give_up(backends):
    source, dest = backends(), backends()
    endpoint = dest.listen()
    for meet in (
        lambda: dest.accept(link_id(), 0.1),
        lambda: source.connect(link_id(), endpoint, 0.1),
    ):
        started = time.monotonic()
        with pytest.raises(LinkBroken):
            meet()
        assert time.monotonic() - started < 10
    dest.close()


def test_two_links_that_nobody_joins_do_not_hold_up_a_third(backends):
    source, dest = backends(), backends()
    endpoint = dest.listen()
    with ThreadPoolExecutor(4) as pool:
        lonely = [pool.submit(dest.accept, link_id(n), 20.0) for n in (7, 8)]
        accepting = pool.submit(dest.accept, link_id(9), 20.0)
        connecting = pool.submit(source.connect, link_id(9), endpoint, 20.0)
        ends = connecting.result(), accepting.result()
        assert not any(waiting.done() for waiting in lonely)
        dest.close()
        for end in ends:
            end.close()
        for waiting in lonely:
            with pytest.raises(LinkBroken):
                waiting.result(5)


# --- rendezvous -----------------------------------------------------------------------------------


def test_nobody_listens():
    backend = GlooBackend("127.0.0.1")
    with pytest.raises(LinkBroken, match="not listening"):
        backend.accept(link_id(), 1.0)
    with pytest.raises(LinkBroken, match="cannot connect"):
        backend.connect(link_id(), "127.0.0.1|1|token", 1.0)
    for endpoint in ("", "nonsense", "127.0.0.1|x|token", "127.0.0.1|99999999|token"):
        with pytest.raises(LinkBroken):
            backend.connect(link_id(), endpoint, 1.0)


def test_strangers_and_silent_callers_do_not_get_in_or_in_the_way():
    source, dest = GlooBackend("127.0.0.1"), GlooBackend("127.0.0.1")
    host, port, token = dest.listen().split("|")
    silent = [socket.create_connection((host, int(port))) for _ in range(5)]
    silent[0].sendall(b"\xff" * 100)
    with pytest.raises(LinkBroken):
        source.connect(link_id(), f"{host}|{port}|{'0' * len(token)}", 1.0)
    with pytest.raises(LinkBroken):
        dest.accept(link_id(), 0.1)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 5.0)
        pool.submit(source.connect, link_id(), f"{host}|{port}|{token}", 5.0).result(5).close()
        accepting.result(5).close()
    for caller in silent:
        caller.close()
    dest.close()


@pytest.mark.parametrize(
    ("kind", "method", "error"),
    [
        (socket.socket, "bind", OSError(99, "cannot assign requested address")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_an_end_that_could_not_listen_does_when_it_is_asked_again(monkeypatch, kind, method, error):
    def fails(*_):
        raise error

    source, dest = GlooBackend("127.0.0.1"), GlooBackend("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, fails)
        for _ in range(2):
            with pytest.raises(type(error), match=str(error.args[-1])):
                dest.listen()
    endpoint = dest.listen()
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 5.0)
        pool.submit(source.connect, link_id(), endpoint, 5.0).result(5).close()
        accepting.result(5).close()
    dest.close()


def test_a_peer_that_talks_nonsense_is_a_broken_link():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        endpoint = f"127.0.0.1|{server.getsockname()[1]}|token"
        connecting = pool.submit(GlooBackend("127.0.0.1").connect, link_id(), endpoint, 5.0)
        peer, _ = server.accept()
        with peer:
            peer.sendall(struct.pack("!II", 2, 0) + b"\xff\xff")  # a key that is no text
            with pytest.raises(LinkBroken, match="decode"):
                connecting.result(10)


def test_a_listener_outlives_calls_for_which_there_is_no_thread(monkeypatch):
    source, dest = GlooBackend("127.0.0.1"), GlooBackend("127.0.0.1")
    endpoint = dest.listen()
    start, refused = threading.Thread.start, []

    def few_threads(thread):
        if thread.name == "kv-greet" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few_threads)
    with pytest.raises(LinkBroken):
        source.connect(link_id(1), endpoint, 5.0)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(2), 5.0)
        pool.submit(source.connect, link_id(2), endpoint, 5.0).result(5).close()
        accepting.result(5).close()
    dest.close()


def test_a_listener_outlives_calls_that_cannot_be_taken(monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "too many open files")] * 3

    def flaky(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", flaky)
    source, dest = GlooBackend("127.0.0.1"), GlooBackend("127.0.0.1")
    host, port, _ = dest.listen().split("|")
    with pytest.raises(LinkBroken):
        source.connect(link_id(), f"{host}|{port}|\u00e9", 1.0)  # hung up on, not ignored
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 30.0)
        pool.submit(source.connect, link_id(), dest.listen(), 30.0).result(60).close()
        accepting.result(60).close()
    assert failures == []
    dest.close()


def test_each_rank_has_a_port_of_its_own():
    backends = [GlooBackend("127.0.0.1") for _ in range(8)]
    assert len({backend.listen() for backend in backends}) == 8
    for backend in backends:
        backend.close()


# --- link threads ---------------------------------------------------------------------------------


class Watched(Operation):
    """`result` is how it ended."""

    def __init__(self, **fields):
        self.result = Future()
        super().__init__(ended=self._ended, **fields)

    def _ended(self, how):
        if isinstance(how, BatonError):
            self.result.set_exception(how)
        else:
            self.result.set_result(how)


def operation(work, num_bytes=8):
    access = PoolAccess()
    return Watched(access=access, num_bytes=num_bytes, work=lambda link, staging: work(access))


def done(access):
    with access.entered():
        return PartResult(num_bytes=0, checksum=0)


def test_a_closed_link_thread_fails_what_is_queued_and_starts_nothing():
    hub = MemoryHub()
    held = Held()
    order = []

    def slow(access):
        with access.entered() as allowed:
            order.append(allowed)
            held()
            order.append("end of the old")
        return PartResult(num_bytes=0, checksum=0)

    def later(access):
        with access.entered() as allowed:
            order.append(("new", allowed))
        return PartResult(num_bytes=0, checksum=0)

    def opening(name):
        return lambda: MemoryBackend(hub)._hub.pipe(link_id(name))

    old = LinkThread(
        link_id(1),
        open_link=opening(1),
        device=torch.device("cpu"),
        predecessor=None,
        waiters=Waiters(torch.device("cpu")),
    )
    old.start()
    running, queued = operation(slow), operation(later)
    old.submit(running)
    old.submit(queued)
    assert held.begun()
    old.close()
    new = LinkThread(
        link_id(2),
        open_link=opening(2),
        device=torch.device("cpu"),
        predecessor=old,
        waiters=Waiters(torch.device("cpu")),
    )
    new.start()
    fresh = operation(later)
    new.submit(fresh)
    with pytest.raises(LinkBroken):
        queued.result.result(5)
    time.sleep(0.05)
    assert not running.result.done()  # it is still inside the pool
    assert not fresh.result.done()  # and so the new link waits
    held.release()
    with pytest.raises(LinkBroken):
        running.result.result(5)
    fresh.result.result(5)
    assert order == [True, "end of the old", ("new", True)]
    after = operation(done)
    old.submit(after)
    with pytest.raises(LinkBroken):
        after.result.result(5)
    new.close()
    assert old.join(5)
    assert new.join(5)


def test_threads_that_wait_for_a_gpu_are_on_it(monkeypatch):
    """With all GPUs of a host in sight, a thread is on the first one until it is told."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    third = torch.device("cuda", 2)
    waiters, seen = Waiters(third), Future()
    waiters.put(0, lambda: seen.set_result(here.device))
    assert seen.result(5) == third
    waiters.close()


def test_whoever_waits_for_a_broken_gpu_learns_of_it(monkeypatch):
    """Nothing can be asked of one after an error in a kernel, not even to be the current one."""

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.tensor([]))
    device = torch.device("cuda", 1)
    waiters, seen = Waiters(device), Future()
    waiters.put(0, lambda: seen.set_result("called"))
    assert seen.result(5) == "called"
    thread = LinkThread(link_id(), open_link=Held, device=device, predecessor=None, waiters=waiters)
    thread.start()
    opened = Future()
    thread.submit(nothing(opened.set_result))
    assert "illegal memory access" in str(opened.result(5))
    assert thread.join(5)
    waiters.close()


def test_a_closed_data_plane_has_no_thread_that_waits(monkeypatch):
    """One in a call of torch at the end of the process would abort it."""
    begun, held = threading.Event(), threading.Event()

    class Marks:
        def wait(self, step, layer):
            begun.set()
            held.wait()

    monkeypatch.setattr(data_plane, "_END_S", 30.0)
    pools = make_pools(make_layout(1))
    pools[0].marks = Marks()
    plane = DataPlane(pools[0], TransferConfig(), backend=MemoryBackend(MemoryHub()))
    before = set(threading.enumerate())
    ended = submitted(plane, RankCommand(ready=ReadyCommand(after=1, layer=0)))
    assert begun.wait(5)
    (waiting,) = set(threading.enumerate()) - before
    threading.Timer(0.1, held.set).start()
    plane.close()
    assert not waiting.is_alive()
    assert ended.result(0).error is None


def test_an_order_ends_after_all_of_its_messages_though_one_cannot_begin(monkeypatch):
    """Else its blocks would be given away while another of its messages is still written."""
    held = Held()

    class Slow:
        def send(self, data, timeout_s):
            held()

        def close(self):
            """It is not heard while it sends."""

    class Backend(MemoryBackend):
        def connect(self, link, endpoint, timeout_s):
            return Slow()

    start, starts = threading.Thread.start, iter([True, False])

    def few_threads(thread):
        if thread.name.startswith("kv-") and not next(starts):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few_threads)
    pools = make_pools(make_layout(1))
    plane = DataPlane(pools[0], TransferConfig(), backend=Backend(MemoryHub()))
    ended = submitted(plane, RankCommand(send=small_move(num_peers=2)))
    assert held.begun()
    assert not ended.done()
    held.release()
    assert "new thread" in ended.result(5).error.message
    plane.close()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_broken_link_keeps_no_buffers_until_it_is_replaced(fails):
    class Ordered:
        ordered = True

        def send_blocks(self, move, timeout_s):
            def end():
                raise LinkBroken(f"the communicator is gone, ordered: {self.ordered}")

            return end if fails == "end" else end()

        recv_blocks = send_blocks

        def close(self):
            """Nothing is held outside."""

    made = []

    def opened():
        link = Ordered()
        made.append(weakref.ref(link))
        return link

    thread = LinkThread(
        link_id(),
        open_link=opened,
        device=torch.device("cpu"),
        predecessor=None,
        waiters=Waiters(torch.device("cpu")),
    )
    thread.start()
    moving = Moving(begin=lambda link: link.send_blocks(None, 1.0), result=lambda _: None, lane=0)
    failing = Watched(access=PoolAccess(), move=moving)
    thread.submit(failing)
    assert "communicator is gone" in str(failing.result.exception(5))
    assert thread.join(5)
    assert made[0]() is None


def test_a_link_without_a_thread_is_broken_for_what_follows(monkeypatch):
    """Else the next message would be the first of this end and the second of the other."""

    def no_threads(thread):
        raise RuntimeError("can't start new thread")

    plane = DataPlane(
        make_pools(make_layout(1))[0], TransferConfig(), backend=MemoryBackend(MemoryHub())
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        first = submitted(plane, RankCommand(receive=small_move()))
        assert "new thread" in first.result(5).error.message
    second = submitted(plane, RankCommand(receive=small_move(sequence=1)))
    assert "new thread" in second.result(5).error.message
    plane.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_what_has_begun_is_ended_though_there_is_no_thread_for_it(monkeypatch, ordered):
    class Device:
        def send_blocks(self, access):
            assert access.enter()
            return lambda: access.leave() or 7

        recv_blocks = send_blocks

        def close(self):
            """Nothing is held outside."""

    Device.ordered = ordered
    start = threading.Thread.start

    def few_threads(thread):
        if thread.name.startswith("kv-wait"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few_threads)
    thread = LinkThread(
        link_id(),
        open_link=Device,
        device=torch.device("cpu"),
        predecessor=None,
        waiters=Waiters(torch.device("cpu")),
    )
    thread.start()
    for _ in range(2):
        access = PoolAccess()
        moving = Moving(begin=lambda link, a=access: link.send_blocks(a), result=int, lane=0)
        moved = Watched(access=access, move=moving)
        thread.submit(moved)
        assert moved.result.result(5) == 7
        assert access.revoke().done()
    thread.close()
    assert thread.join(5)


def test_an_access_can_be_revoked_only_before_it_begins():
    early, late = PoolAccess(), PoolAccess()
    early.revoke()
    assert early.revoke().done()
    with early.entered() as allowed:
        assert not allowed
    with late.entered() as allowed:
        assert allowed
        assert not late.revoke().done()
    assert late.revoke().done()
    with late.entered() as allowed:
        assert not allowed


# --- checksums and settings -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ChecksumKind.CRC32, ChecksumKind.SUM])
def test_checksums_see_every_byte_and_place(kind):
    place = {"generation": 1, "sequence": 2, "source": 0, "dest": 1}
    message = torch.arange(1001).to(torch.uint8)
    good = message_checksum(message, kind, **place)
    assert good == message_checksum(message.clone(), kind, **place)
    for position in (0, 500, 999, 1000):
        bad = message.clone()
        bad[position] ^= 1
        assert message_checksum(bad, kind, **place) != good
    for name in place:
        assert message_checksum(message, kind, **{**place, name: 9}) != good
    assert 0 <= good < 1 << 62
    assert combine([good, 5]) == combine([5, good])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="op_timeout_s"):
        TransferConfig(op_timeout_s=0)
    store = make_pools(make_layout(1))[0]
    for name, reason in (("nccl", "needs a GPU"), ("cuda_ipc", "GPU")):
        with pytest.raises(ValueError, match=reason):
            build_backends(store, TransferConfig(backend=BackendName(name)))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="gloo needs a CPU, the pool is on cuda:0"):
        build_backends(on_gpu, TransferConfig(backend=BackendName.GLOO))
    for name in ("auto", "gloo"):
        backends = build_backends(store, TransferConfig(backend=BackendName(name)))
        assert [backend.name for backend in backends] == ["gloo"]
