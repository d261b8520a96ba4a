"""Messages between rank 0 and its followers."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from torch.distributed import FileStore  # type: ignore[attr-defined]

from protocol.errors import ErrorInfo
from protocol.message import Message

#: Of the connections between rank 0 and its followers (framing.session).
CHANNEL_PURPOSE = b"rank"


class RankInvite(Message):
    """What a follower needs to join, on the same host as rank 0. `store`: path of the file through
    which process groups form; `authkey` is a secret."""

    host: str
    port: int
    store: str
    size: int
    timeout_s: float
    authkey: bytes

    def __repr__(self) -> str:  # without the secret
        return f"RankInvite({self.host}:{self.port}, store={self.store}, size={self.size})"


class Command(StrEnum):
    """Kinds of EngineCommand."""

    OPEN = "open"
    STEP = "step"
    CALL = "call"
    CLOSE = "close"


class EngineCommand(Message):
    """Rank 0 -> follower. `number` is the pool's size for OPEN and the call's number for CALL."""

    number: int = 0
    kind: str = ""
    payload: bytes = b""
    command: Command


class ReportKind(StrEnum):
    """Kinds of Report."""

    ALIVE = "alive"
    LOADED = "loaded"
    ANSWER = "answer"
    BROKEN = "broken"


class Report(Message):
    """Follower -> rank 0. An ANSWER repeats the call's number, LOADED has the number of KV blocks
    that fit; a BROKEN follower ends after it.
    Each carries the steps that the follower has begun and ended, and the collectives that it has
    entered outside of CUDA graphs."""

    number: int = 0
    payload: bytes = b""
    error: ErrorInfo | None = None
    begun: int = 0
    ended: int = 0
    collectives: int = 0
    kind: ReportKind


def open_store(invite: RankInvite) -> FileStore:
    """The store through which the ranks form process groups. A file, because torch's TCPStore looks
    up the name of every client, which takes seconds with a slow name server, and serves any
    client."""
    store = FileStore(invite.store)
    store.set_timeout(timedelta(seconds=invite.timeout_s))
    return store
