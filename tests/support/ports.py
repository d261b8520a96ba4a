"""Ports for components that need a port number."""

from __future__ import annotations

import contextlib
import os
import random
import socket

#: Every process that runs tests beside others draws from ports of its own.
_STRIDE = 16
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _STRIDE
_GIVEN: set[int] = set()
_DRAW = random.SystemRandom()  # processes of the same seed draw different ones


def free_port() -> int:
    """An unused port of 127.0.0.1 below the ephemeral range, so that it stays free until used.
    Never the same twice."""
    while True:
        port = _DRAW.randrange(20_000 + _NUMBER, 32_768, _STRIDE)
        if port in _GIVEN:
            continue
        _GIVEN.add(port)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
