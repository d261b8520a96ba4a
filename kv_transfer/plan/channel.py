"""The protocol that keeps both ends of a channel in step. Pure.

A channel is all links from one prefill worker to one decode worker. Each link delivers messages in
the order in which its two ends queue them, so both workers must queue the pieces of a channel in
the same order. Two numbers in every announcement see to that; prefill draws both from one counter:

- `turn`: the place of the announcement. Decode posts receives in the order of turns and refuses a
  turn that comes after a later one; prefill sends in the order of turns.
- `incarnation`: of the channel. When prefill cannot tell whether both ends are in step, it renews
  the channel under the next number: decode then drops everything posted under a lower one.

    prefill                                      decode
      | -- Piece(incarnation 4, turn 17) -------> |  post receives on every rank
      | -- Piece(incarnation 4, turn 18) -------> |  post receives on every rank
      | <------------------------------- Ack (17) |
      | ==== bytes of turn 17 ==================> |  receives of 17 complete: ARRIVED
      | <------------------------------- Ack (18) |
      | ==== bytes of turn 18 =======  X          |  a receive fails: 4 is BROKEN, piece LOST
      | -- Piece(incarnation 5, turn 19) -------> |  5 is CURRENT, 4 is REPLACED
      | <------------------------------- Ack (19) |
      | ==== the same bytes ====================> |  ARRIVED

Decode judges the incarnation that an announcement names:

    NEW ----named----> CURRENT ----receive failed, or closed here----> BROKEN
                          |                                              |
                          +----- a higher one is named -----> REPLACED <-+

Prefill reacts to the reply by REACTIONS.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import BatonError, DeadlineExceeded, HandoffFailed, StaleMessage, Unavailable

#: Errors of calls that the peer may have acted on.
UNANSWERED = (DeadlineExceeded, Unavailable)


class ReceiveOrder:
    """Decode's end: the highest incarnation named, the highest broken, the last turn posted. All
    three only grow. Prefill may be unaware that an incarnation is broken and go on sending."""

    def __init__(self, broken: int = 0) -> None:
        self.incarnation = broken
        self.turn = 0
        self._broken = broken

    def use(self, incarnation: int) -> None:
        """An announcement names `incarnation`. Raises, naming `incarnation`, StaleMessage when it
        was replaced and HandoffFailed when it is broken: prefill then takes a new one."""
        if incarnation < self.incarnation:
            text = f"incarnation {incarnation} was replaced by {self.incarnation}"
            raise StaleMessage(text, param="incarnation")
        if incarnation <= self._broken:
            raise HandoffFailed(f"incarnation {incarnation} is broken", param="incarnation")
        self.incarnation = incarnation

    def take(self, turn: int) -> None:
        """Post a piece next. Raises HandoffFailed, naming `turn`, when a later one was posted:
        prefill will not send in that order."""
        if turn <= self.turn:
            raise HandoffFailed(f"turn {turn} is too late, {self.turn} was posted", param="turn")
        self.turn = turn

    def fail(self, incarnation: int) -> bool:
        """A receive failed; whether that is news of this incarnation."""
        news = incarnation > self._broken
        self._broken = max(self._broken, incarnation)
        return news


class Reply(StrEnum):
    """What prefill knows after an announcement."""

    POSTED = "posted"  # decode has posted the receives
    LATE = "late"  # a later turn was posted before; nothing is posted for this one
    OUTDATED = "outdated"  # decode does not take this incarnation any more
    UNCERTAIN = "uncertain"  # some try was not answered: receives may be posted
    REFUSED = "refused"

    @classmethod
    def of(cls, error: BatonError | None, *, uncertain: bool) -> Reply:
        if error is None:
            return cls.POSTED
        answered = not isinstance(error, UNANSWERED)
        if answered and (error.param == "incarnation" or (uncertain and error.param == "turn")):
            return cls.OUTDATED
        if uncertain:
            return cls.UNCERTAIN
        return cls.LATE if error.param == "turn" else cls.REFUSED


class Next(StrEnum):
    """What prefill does with the piece."""

    SEND = "send"
    ANNOUNCE = "announce"  # under the next turn
    RETRY = "retry"  # under the next incarnation, as another of the piece's attempts
    FAIL = "fail"  # the hand-off fails


@dataclass(frozen=True, slots=True)
class Reaction:
    """`renew`: the ends may be out of step, take another incarnation."""

    next: Next
    renew: bool = False


REACTIONS: dict[Reply, Reaction] = {
    Reply.POSTED: Reaction(Next.SEND),
    Reply.LATE: Reaction(Next.ANNOUNCE),
    Reply.OUTDATED: Reaction(Next.RETRY, renew=True),
    Reply.UNCERTAIN: Reaction(Next.FAIL, renew=True),
    Reply.REFUSED: Reaction(Next.FAIL),
}
