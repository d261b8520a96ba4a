"""Listening on a free port of a configured range."""

from __future__ import annotations

import socket

import pytest

from framing.ports import bind_free, parse_ports
from kv_transfer.backends.rendezvous import Rendezvous
from rpc.server import ControlServer
from tests.support.ports import free_port

HOST = "127.0.0.1"


@pytest.mark.parametrize("text", ["", "21000", "0-5", "7-6", "1-65536", "a-b", "1-2-3", " 1-2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be LOW-HIGH"):
        parse_ports(text)


def test_every_port_of_the_range_is_used_and_no_other() -> None:
    assert parse_ports("21000-21001") == range(21000, 21002)
    low = free_port()
    ports = f"{low}-{low + 3}"
    sockets = [socket.socket() for _ in range(5)]
    try:
        taken = set()
        for listener in sockets[:4]:
            try:
                bind_free(listener, HOST, ports)
            except OSError:  # another program has some of them
                break
            taken.add(listener.getsockname()[1])
        assert taken <= set(range(low, low + 4))
        assert low in taken
        with pytest.raises(OSError, match=f"no port of {ports} is free"):
            bind_free(sockets[4], HOST, ports)
    finally:
        for listener in sockets:
            listener.close()


async def test_control_and_kv_listen_in_the_range() -> None:
    low = free_port()
    ports = f"{low}-{low + 50}"
    server, rendezvous = ControlServer(secret=b"s" * 16), Rendezvous(HOST, ports)
    try:
        for address in (server.bind(HOST, ports), ":".join(rendezvous.listen().split("|")[:2])):
            assert int(address.rpartition(":")[2]) in parse_ports(ports)
    finally:
        await server.stop()
        rendezvous.close()
