"""Identities of requests, attempts, workers and their processes."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import NamedTuple

from protocol.message import Message


class Role(StrEnum):
    """What routers give a worker: prompts for others, or sequences to decode. A worker begins in
    the role of its pool, and a live one may change it."""

    PREFILL = "prefill"
    DECODE = "decode"


class RequestKey(NamedTuple):
    """One attempt at one request; part of every message about it.

    `attempt` starts at 0 and grows by one with each resubmission, so that late messages of a lost
    attempt are recognised. A tuple, because it is created, hashed and compared for every token.
    """

    request_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    @property
    def loan(self) -> RequestKey:
        """The key of the hand-off that brings KV for the attempt from a third worker."""
        return RequestKey(f"{self.request_id}+kv", self.attempt)


class WorkerRef(Message):
    """Address and incarnation of a worker.

    `worker_id` is the stable name of the replica, `epoch` a random 62-bit number drawn when its
    process started, `role` the one that it began in, `address` the `host:port` of its control
    service. `process` names the processes of its ranks to workers on the same host
    (kv_transfer.backends.host); empty when unknown.
    """

    worker_id: str
    epoch: int
    role: Role
    process: str = ""
    address: str


def new_epoch() -> int:
    return secrets.randbits(62)


def new_request_id() -> str:
    """A random 128-bit id, 32 hex digits. Never a client's id, which could repeat or be guessed."""
    return secrets.token_hex(16)
