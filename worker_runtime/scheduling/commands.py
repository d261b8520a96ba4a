"""What both schedulers are told, and what both ask for."""

from __future__ import annotations

from dataclasses import dataclass

from grammar.matcher import Matcher
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request was accepted. `matcher` is its grammar's, at the output it has so far."""

    submit: Submit
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """These attempts are not wanted any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGone:
    """The router's stream ended: nobody listens to its requests."""

    router_id: str


RouterCommand = Submitted | RequestCancelled | RouterGone


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnded:
    """The hand-off is over without a commit; without an error it was simply not needed. On prefill
    no read of the source blocks is in flight any more."""

    key: RequestKey
    error: ErrorInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHandoff:
    """Asked for: tell the other worker that the hand-off is over."""

    key: RequestKey
    released: bool
    error: ErrorInfo | None
