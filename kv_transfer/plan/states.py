"""Life cycles inside a hand-off and the only transitions they allow.

protocol.states has the hand-off itself; plan.channel has the incarnations of a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from protocol.errors import Internal


class GrantState(StrEnum):
    """Life of one grant of decode's blocks."""

    GRANTED = "granted"  # the hand-off may write them
    QUARANTINED = "quarantined"  # nothing may, but a write may still be in flight
    CLOSED = "closed"  # committed, or no write can reach them any more


class PieceState(StrEnum):
    """Life of one piece on decode, on one incarnation of the channel."""

    POSTED = "posted"
    ARRIVED = "arrived"
    LOST = "lost"


class AccessState(StrEnum):
    """Life of one message's access to the KV pool."""

    ALLOWED = "allowed"
    ACTIVE = "active"
    OVER = "over"


class LinkState(StrEnum):
    """Life of one incarnation of a link."""

    OPENING = "opening"  # messages queue
    OPEN = "open"
    BROKEN = "broken"  # every message fails at once


S = TypeVar("S", bound=StrEnum)
GRANT_TRANSITIONS: dict[GrantState, frozenset[GrantState]] = {
    GrantState.GRANTED: frozenset({GrantState.QUARANTINED, GrantState.CLOSED}),
    GrantState.QUARANTINED: frozenset({GrantState.CLOSED}),
    GrantState.CLOSED: frozenset(),
}
PIECE_TRANSITIONS: dict[PieceState, frozenset[PieceState]] = {
    PieceState.POSTED: frozenset({PieceState.ARRIVED, PieceState.LOST}),
    PieceState.ARRIVED: frozenset(),
    PieceState.LOST: frozenset(),  # a later incarnation posts the piece anew
}
ACCESS_TRANSITIONS: dict[AccessState, frozenset[AccessState]] = {
    AccessState.ALLOWED: frozenset({AccessState.ACTIVE, AccessState.OVER}),  # OVER: revoked
    AccessState.ACTIVE: frozenset({AccessState.OVER}),
    AccessState.OVER: frozenset(),
}
LINK_TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.OPENING: frozenset({LinkState.OPEN, LinkState.BROKEN}),
    LinkState.OPEN: frozenset({LinkState.BROKEN}),
    LinkState.BROKEN: frozenset(),
}


def advance(table: Mapping[S, frozenset[S]], current: S, target: S) -> S:
    """`target`. Raises Internal unless the table allows the step."""
    if target not in table[current]:
        raise Internal(f"{type(target).__name__} is {current}, cannot become {target}")
    return target
