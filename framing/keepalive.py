"""Socket options that notice a peer whose host is gone and therefore closes nothing."""

from __future__ import annotations

import socket

_OPTIONS = (
    ("TCP_USER_TIMEOUT", 15_000),  # ms that sent data may stay unacknowledged
    ("TCP_KEEPIDLE", 10),  # s of idleness before the first probe
    ("TCP_KEEPINTVL", 5),  # s between probes
    ("TCP_KEEPCNT", 3),
)


def enable_keepalive(connection: socket.socket) -> None:
    """Break the connection about 15 s (idle: 25 s) after the peer's host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
