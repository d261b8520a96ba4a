"""How a control call of the hand-off ended, and what that means to it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import BatonError, DeadlineExceeded, HandoffFailed, StaleMessage, Unavailable

#: Errors of calls that the peer may have acted on.
UNANSWERED = (DeadlineExceeded, Unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
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
