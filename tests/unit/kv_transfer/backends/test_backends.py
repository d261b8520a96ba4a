"""The contract of links, rendezvous and checksums, without workers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from framing.session import HandshakeKind, Session
from kv_transfer.backends.base import LinkBroken, LinkId
from kv_transfer.backends.choice import build_backends
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.config import BackendName, ChecksumKind, TransferConfig
from kv_transfer.plan.checksum import combine, content_checksum, place_checksum
from tests.support.transfer import make_layout, make_pools


def link_id(incarnation=1):
    return LinkId(
        sender_epoch=1, receiver_epoch=2, source_rank=0, dest_rank=3, incarnation=incarnation
    )


@pytest.fixture
def ends(backends):
    """The two ends of one link, built at the same time."""
    source, dest = backends(), backends()
    endpoint = dest.listen()
    assert dest.listen() == endpoint
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 60.0)
        connecting = pool.submit(source.connect, link_id(), endpoint, 60.0)
        pair = connecting.result(60), accepting.result(60)
    yield pair
    for end in pair:
        end.close()
        end.close()
    dest.close()
    dest.close()


def data(value, size=1 << 16):
    return torch.full((size,), value, dtype=torch.uint8)


def test_messages_arrive_in_order(ends):
    source, dest = ends
    got = [data(0), data(0, 5), data(0)]
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(
            lambda: [source.send(m, 60.0) for m in (data(1), data(2, 5), data(3))]
        )
        receiving = pool.submit(lambda: [dest.recv(m, 60.0) for m in got])
        sending.result(60)
        receiving.result(60)
    assert [int(m[0]) for m in got] == [1, 2, 3]
    assert all(torch.equal(m, m[:1].expand_as(m)) for m in got)


def test_a_receive_times_out_and_breaks_the_link(ends):
    source, dest = ends
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 0.2)
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 60.0)
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
        sending.exception(60)  # its bytes may have been taken by the network
    assert torch.equal(got, data(7, size))


@pytest.mark.parametrize("which", ["own", "other"])
def test_close_wakes_a_blocked_receive(ends, which):
    source, dest = ends
    threading.Timer(0.2, (dest if which == "own" else source).close).start()
    with pytest.raises(LinkBroken):
        dest.recv(data(0), 1000.0)


def test_a_send_without_a_receive_ends_in_time(ends):
    source, _ = ends
    with pytest.raises(LinkBroken):
        source.send(data(1, 64 << 20), 0.3)


def test_ends_that_never_meet_give_up(backends):
    source, dest = backends(), backends()
    endpoint = dest.listen()
    for meet in (
        lambda: dest.accept(link_id(), 0.1),
        lambda: source.connect(link_id(), endpoint, 0.1),
    ):
        with pytest.raises(LinkBroken):
            meet()
    dest.close()


def test_two_links_without_a_peer_do_not_delay_a_third(backends):
    source, dest = backends(), backends()
    endpoint = dest.listen()
    with ThreadPoolExecutor(4) as pool:
        lonely = [pool.submit(dest.accept, link_id(n), 1000.0) for n in (7, 8)]
        accepting = pool.submit(dest.accept, link_id(9), 60.0)
        connecting = pool.submit(source.connect, link_id(9), endpoint, 60.0)
        ends = connecting.result(), accepting.result()
        assert not any(waiting.done() for waiting in lonely)
        dest.close()
        for end in ends:
            end.close()
        for waiting in lonely:
            with pytest.raises(LinkBroken):
                waiting.result(60)


# --- rendezvous -----------------------------------------------------------------------------------


def test_connection_refused():
    backend = TcpBackend("127.0.0.1")
    with pytest.raises(LinkBroken, match="not listening"):
        backend.accept(link_id(), 1.0)
    with pytest.raises(LinkBroken, match="cannot connect"):
        backend.connect(link_id(), "127.0.0.1|1|token", 1.0)
    for endpoint in ("", "nonsense", "127.0.0.1|x|token", "127.0.0.1|99999999|token"):
        with pytest.raises(LinkBroken):
            backend.connect(link_id(), endpoint, 1.0)


def test_strangers_and_silent_callers_do_not_get_in_or_in_the_way():
    source, dest = TcpBackend("127.0.0.1"), TcpBackend("127.0.0.1")
    host, port, token = dest.listen().split("|")
    silent = [socket.create_connection((host, int(port))) for _ in range(5)]
    silent[0].sendall(b"\xff" * 100)
    with pytest.raises(LinkBroken):
        source.connect(link_id(), f"{host}|{port}|{'0' * len(token)}", 1.0)
    with pytest.raises(LinkBroken):
        dest.accept(link_id(), 0.1)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 60.0)
        pool.submit(source.connect, link_id(), f"{host}|{port}|{token}", 60.0).result(60).close()
        accepting.result(60).close()
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

    source, dest = TcpBackend("127.0.0.1"), TcpBackend("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, fails)
        for _ in range(2):
            with pytest.raises(type(error), match=str(error.args[-1])):
                dest.listen()
    endpoint = dest.listen()
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 60.0)
        pool.submit(source.connect, link_id(), endpoint, 60.0).result(60).close()
        accepting.result(60).close()
    dest.close()


def test_a_receiver_without_the_token_is_a_broken_link():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        endpoint = f"127.0.0.1|{server.getsockname()[1]}|token"
        connecting = pool.submit(TcpBackend("127.0.0.1").connect, link_id(), endpoint, 60.0)
        peer, _ = server.accept()
        with peer:
            told = peer.recv(1000)
            false = Session(b"other", purpose=b"kv link", is_client=False)
            peer.sendall(false.frame(HandshakeKind.HELLO, 0, b"n" * 32 + b"p" * 32))
            with pytest.raises(LinkBroken, match="secret"):
                connecting.result(60)
    assert b"token" not in told


def test_a_stranger_gets_no_block_and_costs_no_file():
    """It neither takes a sender's place nor stays connected."""
    source, dest = TcpBackend("127.0.0.1"), TcpBackend("127.0.0.1")
    endpoint = dest.listen()
    host, port, _ = endpoint.split("|")
    files = len(os.listdir("/proc/self/fd"))
    for said in (b"", b"\0" * 8, (1).to_bytes(8, "little"), b"\0" * 13 + bytes(200)):
        for _ in range(20):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(60)
                with contextlib.suppress(OSError):  # it may have been hung up on already
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(1000) == b""
    until_open(files)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(), 60.0)
        sender = pool.submit(source.connect, link_id(), endpoint, 60.0).result(60)
        receiver = accepting.result(60)
        got = data(0)
        receiving = pool.submit(receiver.recv, got, 60.0)
        sender.send(data(7), 60.0)
        receiving.result(60)
    assert torch.equal(got, data(7))
    sender.close()
    receiver.close()
    until_open(files)
    dest.close()


def until_open(count):
    """Until this process has `count` files open."""
    for _ in range(1200):
        if len(os.listdir("/proc/self/fd")) <= count:
            return
        time.sleep(0.05)
    raise AssertionError(os.listdir("/proc/self/fd"))


def test_a_listener_outlives_calls_for_which_there_is_no_thread(refuse_threads):
    source, dest = TcpBackend("127.0.0.1"), TcpBackend("127.0.0.1")
    endpoint = dest.listen()
    refusals = iter([True])
    refuse_threads(lambda name: name == "kv-handshake" and next(refusals, False))
    with pytest.raises(LinkBroken):
        source.connect(link_id(1), endpoint, 60.0)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(dest.accept, link_id(2), 60.0)
        pool.submit(source.connect, link_id(2), endpoint, 60.0).result(60).close()
        accepting.result(60).close()
    dest.close()


def test_a_listener_outlives_calls_that_cannot_be_taken(monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "too many open files")] * 3

    def flaky(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", flaky)
    source, dest = TcpBackend("127.0.0.1"), TcpBackend("127.0.0.1")
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
    backends = [TcpBackend("127.0.0.1") for _ in range(8)]
    assert len({backend.listen() for backend in backends}) == 8
    for backend in backends:
        backend.close()


# --- checksums and settings -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ChecksumKind.CRC32, ChecksumKind.SUM])
def test_checksums_see_every_byte_and_place(kind):
    place = {"generation": 1, "index": 2, "source": 0, "dest": 1}
    message = torch.arange(1001).to(torch.uint8)

    def checksum(data, where):
        """As the data plane sums a message."""
        seed = place_checksum(**where)
        return combine([seed, content_checksum(data, kind, seed)])

    good = checksum(message, place)
    assert good == checksum(message.clone(), place)
    for position in (0, 500, 999, 1000):
        bad = message.clone()
        bad[position] ^= 1
        assert checksum(bad, place) != good
    for name in place:
        assert checksum(message, {**place, name: 9}) != good
    assert 0 <= good < 1 << 62
    assert combine([good, 5]) == combine([5, good])


def test_two_messages_that_change_places_are_noticed():
    places = [place_checksum(generation=1, index=n, source=0, dest=0) for n in (0, 1)]
    messages = [torch.full((64,), value, dtype=torch.uint8) for value in (1, 2)]

    def total(data):
        kind = ChecksumKind.CRC32
        sums = [content_checksum(part, kind, at) for part, at in zip(data, places, strict=True)]
        return combine(places + sums)

    assert total(messages) != total(messages[::-1])


def test_the_former_name_of_the_backend_is_understood(caplog):
    assert BackendName("gloo") is BackendName.TCP
    assert "is called tcp now" in caplog.text
    with pytest.raises(ValueError, match="pigeon"):
        BackendName("pigeon")


def test_settings_are_checked():
    with pytest.raises(ValueError, match="op_timeout_s"):
        TransferConfig(op_timeout_s=0)
    store = make_pools(make_layout(1))[0]
    for name, reason in (("nccl", "needs a GPU"), ("cuda_ipc", "GPU")):
        with pytest.raises(ValueError, match=reason):
            build_backends(store, TransferConfig(backend=BackendName(name)))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="tcp needs a CPU, the pool is on cuda:0"):
        build_backends(on_gpu, TransferConfig(backend=BackendName.TCP))
    for name in ("auto", "tcp"):
        backends = build_backends(store, TransferConfig(backend=BackendName(name)))
        assert [backend.name for backend in backends] == ["tcp"]
