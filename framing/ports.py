"""Ports from a range that a firewall lets through."""

from __future__ import annotations

import errno
import random
import re
import socket

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_MAX_PORT = 65535


def parse_ports(text: str) -> range:
    """The ports of `LOW-HIGH`, both included. Raises ValueError."""
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < low <= high <= _MAX_PORT:
        raise ValueError(f"must be LOW-HIGH, like 21000-21999, got {text!r}")
    return range(low, high + 1)


def bind_free(listener: socket.socket, host: str, ports: str = "") -> None:
    """Bind to a free port of the range `ports`, or to one of the system's choice. Raises OSError.

    Without SO_REUSEADDR, with which two sockets that do not listen yet may have the same port."""
    if not ports:
        listener.bind((host, 0))
        return
    candidates = parse_ports(ports)
    first = random.randrange(len(candidates))
    for number in range(len(candidates)):
        try:
            listener.bind((host, candidates[(first + number) % len(candidates)]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    raise OSError(errno.EADDRINUSE, f"no port of {ports} is free on {host}")
