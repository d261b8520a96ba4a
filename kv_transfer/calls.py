"""Control calls of the hand-off: repeated when unanswered, and honest about what the peer may have
done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kv_transfer.config import TransferConfig
from protocol.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    StaleMessage,
    Unavailable,
)
from rpc.service import Method

Req = TypeVar("Req")
Rep = TypeVar("Rep")

_FIRST_PAUSE_S = 0.05
_UNANSWERED = (DeadlineExceeded, Unavailable)


class Client(Protocol):
    """One peer's control channel (rpc.ControlClient)."""

    async def call(self, method: Method[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        """One reply, or the peer's typed error; Unavailable or DeadlineExceeded when there is
        none."""
        ...


class Clients(Protocol):
    """Control channels by address (rpc.ClientPool)."""

    def get(self, address: str) -> Client:
        """The channel to `address`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a call ended. `error` is None when the peer acknowledged.

    `uncertain`: some try was not answered, so the peer may have acted on it whatever it says now.
    """

    error: BatonError | None
    uncertain: bool

    @property
    def refused(self) -> bool:
        """The peer answered, and said no."""
        return self.error is not None and not isinstance(self.error, _UNANSWERED)


async def call_repeatedly(
    client: Client,
    method: Method[Req, Rep],
    request: Req,
    config: TransferConfig,
    attempts: int | None = None,
) -> Answer:
    """Call an idempotent method until it is answered, at most `attempts` times (None:
    `rpc_attempts`)."""
    error: BatonError | None = None
    for attempt in range(attempts or config.rpc_attempts):
        if isinstance(error, Unavailable):  # refused at once: give the peer a moment
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        try:
            await client.call(method, request, timeout_s=config.rpc_timeout_s)
        except _UNANSWERED as unanswered:
            error = unanswered
        except BatonError as refusal:
            return Answer(error=refusal, uncertain=attempt > 0)
        else:
            return Answer(error=None, uncertain=False)
    return Answer(error=error, uncertain=True)


def as_failure(error: BatonError, who: str) -> BatonError:
    """What an unsuccessful call means to a hand-off: a refusal as it is, silence as a failure."""
    if isinstance(error, (StaleMessage, HandoffFailed)):
        return error
    return HandoffFailed(f"{who}: {error.message}", param=error.param)
