"""Every control method of the cluster, declared once for server and client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.message import Message
from protocol.messages import (
    Ack,
    Cancel,
    Commit,
    DrainCommand,
    EventBatch,
    Grant,
    HandoffEnd,
    LinkOffer,
    OpenLinks,
    Piece,
    StatusQuery,
    Submit,
    Subscribe,
    WorkerStatus,
)

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
CANCEL = Method(_WORKER, "Cancel", Cancel, Ack)
EVENTS = Method(_WORKER, "Events", Subscribe, EventBatch, streams=True)
STATUS = Method(_WORKER, "Status", StatusQuery, WorkerStatus)
DRAIN = Method(_WORKER, "Drain", DrainCommand, Ack)

# decode -> prefill
GRANT = Method(_HANDOFF, "Grant", Grant, Ack)
# prefill -> decode
OPEN_LINKS = Method(_HANDOFF, "OpenLinks", OpenLinks, LinkOffer)
PIECE = Method(_HANDOFF, "Piece", Piece, Ack)
COMMIT = Method(_HANDOFF, "Commit", Commit, Ack)
# either way
END = Method(_HANDOFF, "End", HandoffEnd, Ack)
