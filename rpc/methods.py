"""Every control method of the cluster, declared once for server and client, and the frames that
carry calls of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec

from protocol.loans import LoanOffer, LoanRequest
from protocol.message import Message
from protocol.messages import (
    Ack,
    Cancel,
    Commit,
    CommitNotice,
    DrainCommand,
    EventBatch,
    Grant,
    HandoffEnd,
    LinkOffer,
    MoveRequest,
    OpenLinks,
    Piece,
    RoleCommand,
    StatusQuery,
    Submit,
    Subscribe,
    WorkerStatus,
)
from protocol.stored_responses import ResponseCopy, ResponseQuery

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
    name = path.encode()
    return _PATH_SIZE.pack(len(name)) + name + request


def unpack_call(payload: bytes) -> tuple[str, bytes]:
    start = _PATH_SIZE.size
    end = start + int.from_bytes(payload[:start], "big")
    return payload[start:end].decode(errors="replace"), payload[end:]


Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
#: Of a call: returns the reply, or a coroutine of it. Of a stream: an iterator of replies.
Handler = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Rep]):
    """One control method: `/service/name`, its message classes, whether it streams replies."""

    service: str
    name: str
    request: type[Req]
    reply: type[Rep]
    streams: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


_WORKER = "baton.worker.v1.Worker"
_HANDOFF = "baton.handoff.v1.Handoff"

# router -> any worker
SUBMIT = Method(_WORKER, "Submit", Submit, Ack)
MOVE = Method(_WORKER, "Move", MoveRequest, Ack)
CANCEL = Method(_WORKER, "Cancel", Cancel, Ack)
EVENTS = Method(_WORKER, "Events", Subscribe, EventBatch, streams=True)
STATUS = Method(_WORKER, "Status", StatusQuery, WorkerStatus)
ROLE = Method(_WORKER, "Role", RoleCommand, Ack)
DRAIN = Method(_WORKER, "Drain", DrainCommand, Ack)

# router -> router
RESPONSE = Method("baton.router.v1.Router", "Response", ResponseQuery, ResponseCopy)

# decode -> prefill
GRANT = Method(_HANDOFF, "Grant", Grant, Ack)
# prefill -> decode
OPEN_LINKS = Method(_HANDOFF, "OpenLinks", OpenLinks, LinkOffer)
PIECE = Method(_HANDOFF, "Piece", Piece, Ack)
COMMIT_NOTICE = Method(_HANDOFF, "CommitNotice", CommitNotice, Ack)
COMMIT = Method(_HANDOFF, "Commit", Commit, Ack)
# receiver -> sender
LEND = Method(_HANDOFF, "Lend", LoanRequest, LoanOffer)
# either way
END = Method(_HANDOFF, "End", HandoffEnd, Ack)


@cache
def protocol_digest(*others: type[Message]) -> str:
    """Another one after any change of a control method or message, or of the `others`: processes
    that differ in it do not understand each other."""
    methods = sorted(
        (each for each in globals().values() if isinstance(each, Method)), key=lambda m: m.path
    )
    messages = [kind for method in methods for kind in (method.request, method.reply)]
    shapes = msgspec.json.schema_components([*messages, *others])
    text = repr([method.path for method in methods]) + repr(_without_docstrings(shapes))
    return sha256(text.encode()).hexdigest()[:8]


def _without_docstrings(shape: Any) -> Any:
    if isinstance(shape, dict):
        return [(k, _without_docstrings(shape[k])) for k in sorted(shape) if k != "description"]
    if isinstance(shape, list | tuple):
        return [_without_docstrings(part) for part in shape]
    return shape
