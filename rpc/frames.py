"""Kinds of frames between a caller and a server, and their limits."""

from __future__ import annotations

import struct
from enum import IntEnum

_PATH_SIZE = struct.Struct("!H")
#: Items of a stream that may be on their way. Socket buffers hold minutes of items for a process
#: that is frozen; this limit makes its peer notice.
STREAM_ITEMS = 128
#: A reader reports every so many items.
ITEMS_PER_REPORT = 32


class FrameKind(IntEnum):
    """Kinds after the handshake (framing.session)."""

    CALL = 2
    STREAM = 3
    CANCEL = 4
    REPLY = 5
    ERROR = 6
    ITEM = 7
    END = 8
    ITEMS_READ = 9  # from the reader of a stream: ITEMS_PER_REPORT more of them


def pack_call(path: str, request: bytes) -> bytes:
    """The payload of a CALL or STREAM."""
    name = path.encode()
    return _PATH_SIZE.pack(len(name)) + name + request


def unpack_call(payload: bytes) -> tuple[str, bytes]:
    """Path and request of a CALL or STREAM."""
    start = _PATH_SIZE.size
    end = start + int.from_bytes(payload[:start], "big")
    return payload[start:end].decode(errors="replace"), payload[end:]
