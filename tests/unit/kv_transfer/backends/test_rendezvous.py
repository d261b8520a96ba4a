"""Who comes to a receiver's socket and is not the sender that it waits for."""

from __future__ import annotations

import socket
import struct
import time

from kv_transfer.backends import rendezvous
from kv_transfer.backends.rendezvous import Rendezvous


def test_a_caller_that_says_a_byte_now_and_then_is_hung_up_on(monkeypatch):
    """Or strangers could keep as many threads as they like."""
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_S", 0.2)
    meeting = Rendezvous("127.0.0.1")
    host, port, _ = meeting.listen().split("|")
    said = 0
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(struct.pack("!IBQ", 200, 0, 0))
        try:
            while said < 100:
                time.sleep(0.05)
                caller.sendall(b"x")
                said += 1
        except ConnectionError:
            pass
    meeting.close()
    assert said < 100
