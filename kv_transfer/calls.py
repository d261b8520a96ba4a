"""What a control call of the hand-off needs, and what its end means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

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

#: Errors of calls that the peer may have acted on.
UNANSWERED = (DeadlineExceeded, Unavailable)


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
        return self.error is not None and not isinstance(self.error, UNANSWERED)


def as_failure(error: BatonError, who: str) -> BatonError:
    """What an unsuccessful call means to a hand-off: a refusal as it is, silence as a failure."""
    if isinstance(error, (StaleMessage, HandoffFailed)):
        return error
    return HandoffFailed(f"{who}: {error.message}", param=error.param)
