"""What both schedulers are told by routers."""

from __future__ import annotations

from dataclasses import dataclass

from grammar.matcher import Matcher
from protocol.ids import RequestKey
from protocol.messages import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request was accepted. `matcher` is its grammar's, at the output it has so far."""

    submit: Submit
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """These attempts are not wanted any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGone:
    """The router's stream ended: nobody listens to its requests."""

    router_id: str


RouterCommand = Submitted | Cancelled | RouterGone
