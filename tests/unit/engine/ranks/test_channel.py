"""The wire between rank 0 and a follower: framing, mutual proof of the key, silence."""

from __future__ import annotations

import socket
import threading

import pytest

from engine.ranks.channel import Channel, ChannelClosed, greet, welcome

KEY = b"k" * 32


def channels(timeout_s: float = 5.0) -> tuple[Channel, Channel]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    return Channel(accepted, timeout_s=timeout_s), Channel(client, timeout_s=timeout_s)


def shake_hands(leader_key: bytes, follower_key: bytes, rank: int = 2):
    """(what rank 0 got, what the follower got): a rank, None or the error."""
    leader, follower = channels()
    outcome: list[object] = []

    def answer():
        try:
            outcome.append(greet(follower, follower_key, rank))
        except ChannelClosed as error:
            outcome.append(error)
            follower.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        mine: object = welcome(leader, leader_key)
    except ChannelClosed as error:
        mine = error
        leader.close()
    thread.join(10)
    return mine, outcome[0]


def test_messages_arrive_whole_and_in_order():
    first, second = channels()
    messages = [b"", b"a", bytes(range(256)) * 5000]
    thread = threading.Thread(target=lambda: [first.send(message) for message in messages])
    thread.start()
    assert [second.receive() for _ in messages] == messages
    thread.join()


def test_both_sides_prove_the_key_and_the_rank_is_told():
    assert shake_hands(KEY, KEY) == (2, None)


def test_a_stranger_is_turned_away_by_either_side():
    mine, theirs = shake_hands(KEY, b"x" * 32)
    assert isinstance(mine, ChannelClosed)
    assert isinstance(theirs, ChannelClosed)


def test_a_short_answer_is_not_a_proof():
    leader, follower = channels()
    follower.send(b"short")
    with pytest.raises(ChannelClosed):
        welcome(leader, KEY)


def test_closing_wakes_a_waiting_reader():
    first, second = channels()
    threading.Timer(0.1, first.close).start()
    with pytest.raises(ChannelClosed):
        first.receive()
    with pytest.raises(ChannelClosed, match="closed"):
        second.receive()
    with pytest.raises(ChannelClosed):
        first.send(b"late")


def test_silence_ends_a_channel_that_has_a_limit():
    first, _second = channels(timeout_s=0.1)
    with pytest.raises(ChannelClosed, match="timed out"):
        first.receive()


def test_an_absurd_length_is_refused():
    first, second = channels()
    first._socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ChannelClosed, match="too long"):
        second.receive()
    with pytest.raises(ValueError, match="too long"):
        first.send(bytes((1 << 28) + 1))
