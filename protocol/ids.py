"""Identities: requests, attempts, workers and their incarnations."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import NamedTuple

from protocol.message import Message


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class RequestKey(NamedTuple):
    """One attempt at one request. Every message about a request carries it.

    `attempt` starts at 0 and grows by one each time the router submits the request again,
    so that anything a lost attempt still sends is recognised as old. A tuple, because it is made,
    hashed and compared for every token.
    """

    request_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class WorkerRef(Message):
    """Where a worker is and which incarnation of it is meant.

    `worker_id` is the stable name of the replica, `epoch` a random 62-bit number drawn when its
    process started, `address` the `host:port` of its control service. `process` names its process
    to workers on the same host (kv_transfer.backends.host); empty when unknown.
    """

    worker_id: str
    epoch: int
    role: Role
    process: str = ""
    address: str


def new_epoch() -> int:
    """A number that no other incarnation of any worker shares."""
    return secrets.randbits(62)


def new_request_id() -> str:
    """A 128-bit random id, 32 hex digits: never a client's, so never guessed or repeated."""
    return secrets.token_hex(16)
