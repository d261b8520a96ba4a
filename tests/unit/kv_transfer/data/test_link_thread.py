"""The threads of a data plane: links that break, block and lack threads."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.backends.base import LinkBroken, LinkId, LinkMode, PoolAccess
from kv_transfer.config import TransferConfig
from kv_transfer.data import data_plane
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.link_thread import LinkMessage, LinkThread
from kv_transfer.data.rank_commands import (
    CloseCommand,
    MoveCommand,
    Part,
    RankCommand,
    ReadyCommand,
)
from kv_transfer.data.threads import SerialThreads
from protocol.errors import BatonError
from protocol.kv_layout import Cells
from tests.support.held import Held
from tests.support.memory_links import MemoryBackend, MemoryHub
from tests.support.moves import make_move
from tests.support.transfer import make_layout, make_pools, submitted

CPU = torch.device("cpu")


def link_id(incarnation=1):
    return LinkId(
        sender_epoch=1, receiver_epoch=2, source_rank=0, dest_rank=3, incarnation=incarnation
    )


def small_move(index=0, num_peers=1):
    return MoveCommand(
        rank=0,
        sender_epoch=1,
        receiver_epoch=2,
        incarnation=1,
        generation=1,
        index=index,
        cells=Cells(blocks=(0,), size=4, count=1),
        first_layer=0,
        num_layers=1,
        parts=tuple(Part(peer_rank=rank, first_head=0, num_heads=1) for rank in range(num_peers)),
    )


class Watched(LinkMessage):
    """A message of one block; `ended` is how."""

    def __init__(self):
        self.ended = Future()
        move = make_move((0,), block_size=4, num_layers=1, num_heads=1)
        super().__init__(done=self._done, move=move)

    def _done(self, how):
        if isinstance(how, BatonError):
            self.ended.set_exception(how)
        else:
            self.ended.set_result(how)


def link_thread(open_link, *, incarnation=1, device=CPU, predecessor=None):
    thread = LinkThread(
        link_id(incarnation),
        open_link=open_link,
        device=device,
        predecessor=predecessor,
        completion=SerialThreads("kv-write", device),
    )
    thread.start()
    return thread


class FakeLink:
    """A link whose moves are `run`, which returns their checksum."""

    mode = LinkMode.BLOCKING

    def __init__(self, run):
        self._run = run

    def send_blocks(self, move, timeout_s):
        checksum = self._run(move)
        return lambda: checksum

    recv_blocks = send_blocks

    def close(self):
        """A running move does not notice."""


def test_a_closed_link_thread_fails_what_is_queued_and_starts_nothing():
    held = Held()
    order = []

    def slow(move):
        with move.access.entered() as allowed:
            order.append(allowed)
            held()
            order.append("end of the old")
        return 0

    def quick(move):
        with move.access.entered() as allowed:
            order.append(("new", allowed))
        return 0

    old = link_thread(lambda: FakeLink(slow))
    running, queued = Watched(), Watched()
    old.submit(running)
    old.submit(queued)
    assert held.begun()
    old.close()
    new = link_thread(lambda: FakeLink(quick), incarnation=2, predecessor=old)
    fresh = Watched()
    new.submit(fresh)
    with pytest.raises(LinkBroken):
        queued.ended.result(60)
    time.sleep(0.05)
    assert not running.ended.done()  # it is still inside the pool
    assert not fresh.ended.done()  # and so the new link waits
    held.release()
    with pytest.raises(LinkBroken):
        running.ended.result(60)
    fresh.ended.result(60)
    assert order == [True, "end of the old", ("new", True)]
    after = Watched()
    old.submit(after)
    with pytest.raises(LinkBroken):
        after.ended.result(60)
    new.close()
    assert old.join(60)
    assert new.join(60)


def test_a_third_incarnation_waits_for_the_first_though_the_second_never_ran():
    held = Held()

    def slow(move):
        with move.access.entered():
            held()
        return 0

    first = link_thread(lambda: FakeLink(slow))
    first.submit(Watched())
    assert held.begun()
    second = link_thread(lambda: FakeLink(lambda _: 0), incarnation=2, predecessor=first)
    third = link_thread(lambda: FakeLink(lambda _: 0), incarnation=3, predecessor=second)
    fresh = Watched()
    third.submit(fresh)
    time.sleep(0.05)
    assert not fresh.ended.done()
    held.release()
    assert fresh.ended.result(60).num_bytes == 0
    third.close()
    assert all(thread.join(60) for thread in (first, second, third))


def test_threads_that_wait_for_a_gpu_are_on_it(monkeypatch):
    """With all GPUs of a host in sight, a thread is on the first one until it is told."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    third = torch.device("cuda", 2)
    threads, seen = SerialThreads("kv-test", third), Future()
    threads.put(0, lambda: seen.set_result(here.device))
    assert seen.result(60) == third
    threads.close()


def test_a_thread_of_a_broken_gpu_reports_it(monkeypatch):
    """Nothing can be asked of one after an error in a kernel, not even to be the current one."""

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.tensor([]))
    device = torch.device("cuda", 1)
    threads, seen = SerialThreads("kv-test", device), Future()
    threads.put(0, lambda: seen.set_result("called"))
    assert seen.result(60) == "called"
    thread = link_thread(Held, device=device)
    opened = Future()
    thread.submit(LinkMessage(done=opened.set_result))
    assert "illegal memory access" in str(opened.result(60))
    assert thread.join(60)
    threads.close()


def test_a_closed_data_plane_has_no_thread_that_waits(monkeypatch):
    """One in a call of torch at the end of the process would abort it."""
    begun, held = threading.Event(), threading.Event()

    class Marks:
        def wait(self, step, layer):
            begun.set()
            held.wait()

    monkeypatch.setattr(data_plane, "_JOIN_TIMEOUT_S", 30.0)
    pools = make_pools(make_layout(1))
    pools[0].step_events = Marks()
    plane = DataPlane(pools[0], TransferConfig(), backend=MemoryBackend(MemoryHub()))
    before = set(threading.enumerate())
    ended = submitted(plane, RankCommand(ready=ReadyCommand(after=1, layer=0)))
    assert begun.wait(60)
    (waiting,) = set(threading.enumerate()) - before
    threading.Timer(0.1, held.set).start()
    plane.close()
    assert not waiting.is_alive()
    assert ended.result(0).error is None


def test_an_order_ends_after_all_of_its_messages_though_one_cannot_begin(refuse_threads):
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

    starts = iter([True, False])
    refuse_threads(lambda name: name.startswith("kv-") and not next(starts))
    pools = make_pools(make_layout(1))
    plane = DataPlane(pools[0], TransferConfig(), backend=Backend(MemoryHub()))
    ended = submitted(plane, RankCommand(send=small_move(num_peers=2)))
    assert held.begun()
    assert not ended.done()
    held.release()
    assert "new thread" in ended.result(60).error.message
    plane.close()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_broken_link_keeps_no_buffers_until_it_is_replaced(fails):
    class Pipelined:
        mode = LinkMode.PIPELINED

        def send_blocks(self, move, timeout_s):
            def end():
                raise LinkBroken(f"the communicator is gone: {self.mode}")

            return end if fails == "end" else end()

        recv_blocks = send_blocks

        def close(self):
            """Nothing is held outside."""

    made = []

    def opened():
        link = Pipelined()
        made.append(weakref.ref(link))
        return link

    thread = link_thread(opened)
    failing = Watched()
    thread.submit(failing)
    assert "communicator is gone" in str(failing.ended.exception(60))
    assert thread.join(60)
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
        assert "new thread" in first.result(60).error.message
    second = submitted(plane, RankCommand(receive=small_move(index=1)))
    assert "new thread" in second.result(60).error.message
    plane.close()


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (LinkMode.BLOCKING, f"kv-{link_id()}"),
        (LinkMode.PIPELINED, "kv-done"),
        (LinkMode.UNORDERED, "kv-write"),
    ],
)
def test_what_blocks_ends_before_the_next_begins_and_what_does_not_elsewhere(mode, name):
    order = []

    class Device(FakeLink):
        def send_blocks(self, move, timeout_s):
            order.append("begun")

            def end():
                order.append(threading.current_thread().name)
                return 7

            return end

        recv_blocks = send_blocks

    Device.mode = mode
    thread = link_thread(lambda: Device(None))
    messages = [Watched() for _ in range(3)]
    for each in messages:
        thread.submit(each)
    assert [each.ended.result(60).checksum for each in messages] == [7, 7, 7]
    ends = [each for each in order if each != "begun"]
    assert all(each.startswith(name) for each in ends), ends
    if mode is LinkMode.BLOCKING:
        assert order == ["begun", ends[0]] * 3
    assert thread._pending == set()  # nothing of them is kept, or told a second time
    thread.close()
    assert thread.join(60)


@pytest.mark.parametrize("mode", [LinkMode.PIPELINED, LinkMode.UNORDERED])
def test_what_has_begun_is_ended_though_there_is_no_thread_for_it(refuse_threads, mode):
    class Device:
        def send_blocks(self, move, timeout_s):
            assert move.access.enter()
            return lambda: move.access.leave() or 7

        recv_blocks = send_blocks

        def close(self):
            """Nothing is held outside."""

    Device.mode = mode
    refuse_threads(lambda name: name.startswith(("kv-done", "kv-write")))
    thread = link_thread(Device)
    for _ in range(2):
        moved = Watched()
        thread.submit(moved)
        assert moved.ended.result(60).checksum == 7
        assert moved.move.access.revoke().done()
    thread.close()
    assert thread.join(60)


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


def test_only_links_between_two_workers_up_to_an_incarnation_are_closed():
    plane = DataPlane(
        make_pools(make_layout(1))[0], TransferConfig(), backend=MemoryBackend(MemoryHub())
    )
    closed = []

    def link(incarnation, name):
        return SimpleNamespace(
            link=SimpleNamespace(incarnation=incarnation), close=lambda _: closed.append(name)
        )

    plane._links = {
        (1, 9, 0, 0): link(3, "own"),
        (1, 9, 1, 0): link(4, "newer"),
        (2, 9, 0, 0): link(3, "of another sender"),
        (1, 8, 0, 0): link(3, "of another receiver"),
    }
    for forget, left in ((False, 4), (True, 3)):
        close = CloseCommand(sender_epoch=1, receiver_epoch=9, incarnation=3, forget=forget)
        assert submitted(plane, RankCommand(close=close)).result(60).error is None
        assert len(plane._links) == left
    assert closed == ["own", "own"]
    plane._links.clear()
    plane.close()
