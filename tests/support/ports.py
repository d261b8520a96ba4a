"""Ports for those that must be told one."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
