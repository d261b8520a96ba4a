"""Ports for those that must be told one."""

from __future__ import annotations

import contextlib
import random
import socket

_GIVEN: set[int] = set()


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on, below those that systems give to whoever asks for
    any: it stays free until it is used. Never the same again."""
    while True:
        port = random.randrange(20_000, 32_768)
        if port in _GIVEN:
            continue
        _GIVEN.add(port)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
