"""Blocking connections: framing, mutual proof of the secret, and a deadline for every message."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from framing.channel import Channel, ChannelClosed
from framing.session import MAX_PAYLOAD_BYTES, HandshakeKind, Session

SECRET = b"k" * 32
PURPOSE = b"test"


def sockets() -> tuple[socket.socket, socket.socket]:
    """An accepted connection and the one that connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def greeted(
    server_secret: bytes = SECRET,
    client_secret: bytes = SECRET,
    *,
    purposes: tuple[bytes, bytes] = (PURPOSE, PURPOSE),
):
    """Each end's channel, or its error."""
    accepted, connected = sockets()

    def outcome(make, connection, secret, purpose):
        try:
            return make(connection, secret, purpose=purpose, limit=soon())
        except ChannelClosed as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        server = pool.submit(outcome, Channel.server, accepted, server_secret, purposes[0])
        client = pool.submit(outcome, Channel.client, connected, client_secret, purposes[1])
        return server.result(60), client.result(60)


@pytest.fixture
def pair():
    """Both ends of a connection: server, client."""
    channels = greeted()
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order_in_both_directions(pair):
    messages = [b"", b"a", bytes(range(256)) * 50_000]
    for sender, receiver in (pair, pair[::-1]):
        thread = threading.Thread(target=lambda s=sender: [s.send(m, soon()) for m in messages])
        thread.start()
        assert [receiver.receive(soon()) for _ in messages] == messages
        thread.join()


@pytest.mark.parametrize(
    "other", [b"x" * 32, SECRET + b"\0", b""], ids=["other", "zero at the end", "empty"]
)
def test_two_secrets_do_not_match(other):
    for secrets in ((SECRET, other), (other, SECRET)):
        server, client = greeted(*secrets)
        assert isinstance(client, ChannelClosed)
        assert "secret" in str(client)
        assert isinstance(server, ChannelClosed)


def test_connections_of_two_purposes_do_not_match():
    server, client = greeted(purposes=(b"rank", b"kv"))
    assert isinstance(server, ChannelClosed)
    assert isinstance(client, ChannelClosed)


@pytest.mark.parametrize(
    "said",
    [
        b"\0" * 13,
        b"\xff" * 64,
        Session(SECRET, purpose=PURPOSE, is_client=True).frame(HandshakeKind.PROOF, 0, b"p" * 32),
        Session(SECRET, purpose=PURPOSE, is_client=True).opening() * 2,
    ],
    ids=["zeros", "ones", "proof without hello", "hello twice"],
)
def test_a_client_without_a_proof_is_refused(said):
    accepted, client = sockets()
    with client:
        client.sendall(said)
        with pytest.raises(ChannelClosed):
            Channel.server(accepted, SECRET, purpose=PURPOSE, limit=soon())


def test_a_server_without_a_proof_is_told_nothing():
    accepted, client = sockets()
    with accepted, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Channel.client, client, SECRET, purpose=PURPOSE, limit=soon())
        told = accepted.recv(1000)
        false = Session(b"other", purpose=PURPOSE, is_client=False)
        accepted.sendall(false.frame(HandshakeKind.HELLO, 0, b"n" * 32 + b"p" * 32))
        with pytest.raises(ChannelClosed, match="secret"):
            joining.result(60)
        assert len(told) == 13 + 32  # a random number
        assert accepted.recv(1000) == b""


def test_a_changed_byte_closes_the_connection(pair):
    server, client = pair
    frame = bytearray(client._session.frame(2, 0, b"message"))
    frame[-20] ^= 1
    client._socket.sendall(frame)
    with pytest.raises(ChannelClosed, match="seal"):
        server.receive(soon())
    with pytest.raises(ChannelClosed):
        client.receive(soon())


def test_a_repeated_message_closes_the_connection(pair):
    server, client = pair
    frame = client._session.frame(2, 0, b"message")
    client._socket.sendall(frame * 2)
    assert server.receive(soon()) == b"message"
    with pytest.raises(ChannelClosed, match="seal"):
        server.receive(soon())


def test_a_message_that_comes_byte_by_byte_ends_at_its_deadline(pair):
    """A deadline for each read would start anew with every byte."""
    server, client = pair
    stop = threading.Event()

    def drip():
        for byte in client._session.frame(2, 0, bytes(1000)):
            if stop.wait(0.02):
                return
            try:
                client._socket.send(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(ChannelClosed, match="timed out"):
        server.receive(soon(0.3))  # all of it takes 20 s
    stop.set()
    thread.join()


def test_a_handshake_that_comes_byte_by_byte_ends_at_its_deadline():
    accepted, client = sockets()
    opening = Session(SECRET, purpose=PURPOSE, is_client=True).opening()

    def drip():
        for byte in opening:
            time.sleep(0.05)
            try:
                client.send(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with client, pytest.raises(ChannelClosed, match="timed out"):
        Channel.server(accepted, SECRET, purpose=PURPOSE, limit=soon(0.3))
    thread.join()


def test_an_unread_message_ends_at_its_deadline(pair):
    with pytest.raises(ChannelClosed, match="timed out"):
        pair[0].send(bytes(64 << 20), soon(0.3))
    with pytest.raises(ChannelClosed):  # half a message was sent: nothing can follow
        pair[0].send(b"next", soon())


def test_a_reader_that_waits_for_nothing_in_particular_has_no_deadline(pair):
    server, client = pair
    threading.Timer(0.3, lambda: client.send(b"late", soon())).start()
    server.wait_readable()
    assert server.receive(soon()) == b"late"


@pytest.mark.parametrize("which", [0, 1])
def test_closing_either_end_wakes_a_waiting_reader(pair, which):
    threading.Timer(0.1, pair[which].close).start()
    with pytest.raises(ChannelClosed):
        pair[0].receive()
    with pytest.raises(ChannelClosed):
        pair[1].receive()
    with pytest.raises(ChannelClosed):
        for _ in range(3):  # the first may still fit the network's buffers
            pair[0].send(bytes(1 << 22), soon())


def test_a_message_that_is_too_long_is_refused(pair):
    with pytest.raises(ValueError, match="too long"):
        pair[0].send(bytes(MAX_PAYLOAD_BYTES + 1))
    pair[0]._socket.sendall(b"\xff\xff\xff\xff" + b"\0" * 9)
    with pytest.raises(ChannelClosed, match="too long"):
        pair[1].receive(soon())


def test_bulk_bytes_pass_unchanged(pair):
    sender, receiver = pair
    data = bytes(range(256)) * (1 << 14)
    got = bytearray(len(data))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send_bulk, memoryview(data), soon())
        receiver.receive_bulk(memoryview(got), soon())
        sending.result(60)
        assert bytes(got) == data
        sender.send_bulk(memoryview(b""), soon())
        receiver.receive_bulk(memoryview(bytearray()), soon())
        sender.send(b"and on", soon())
        assert receiver.receive(soon()) == b"and on"


def test_bulk_bytes_of_another_size_are_not_taken(pair):
    sender, receiver = pair
    got = bytearray(10)
    sender.send_bulk(memoryview(b"12345678901"), soon())
    with pytest.raises(ChannelClosed, match="11 bytes, 10"):
        receiver.receive_bulk(memoryview(got), soon())
    assert got == bytearray(10)
