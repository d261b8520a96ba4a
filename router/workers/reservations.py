"""This router's attempts on one worker, as far as its load report does not show them. Pure.

The report of a worker and its reservations add up to one account of outstanding work: an attempt
counts here from its submit until a report includes it, and a cancelled one is taken off until a
report excludes it. Reports and acknowledgements carry a number of commands
(protocol.messages.WorkerLoad), so their order of arrival does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from protocol.ids import RequestKey
from protocol.messages import size_class


class ReservationState(Enum):
    """Whether the worker's latest report includes an attempt, and whether it should."""

    SENT = auto()  # not included yet
    REPORTED = auto()  # included
    DROPPED = auto()  # cancelled before a report included it
    WITHDRAWN = auto()  # cancelled, and included still


class _LoadEvent(Enum):
    INCLUDED = auto()  # a report covers the submit
    CANCELLED = auto()


_NEXT = {
    (ReservationState.SENT, _LoadEvent.INCLUDED): ReservationState.REPORTED,
    (ReservationState.SENT, _LoadEvent.CANCELLED): ReservationState.DROPPED,
    (ReservationState.REPORTED, _LoadEvent.CANCELLED): ReservationState.WITHDRAWN,
    (ReservationState.DROPPED, _LoadEvent.INCLUDED): ReservationState.WITHDRAWN,
}
#: What is to be added to the report.
_SIGN = {
    ReservationState.SENT: 1,
    ReservationState.REPORTED: 0,
    ReservationState.DROPPED: 0,
    ReservationState.WITHDRAWN: -1,
}
_LIVE = (ReservationState.SENT, ReservationState.REPORTED)


@dataclass(slots=True)
class _Reservation:
    tokens: int
    blocks: int
    state: ReservationState = ReservationState.SENT
    computed: bool = False


class Reservations:
    """What to add to a worker's load report: `sequences`, `tokens` to compute, `blocks`; negative
    while cancelled attempts are in the report.

    Every call is idempotent and ignores unknown keys, so no mix of failures leaks a count.
    """

    def __init__(self) -> None:
        self._entries: dict[RequestKey, _Reservation] = {}
        self._tokens: dict[int, int] = {}  # by size class
        self._num_commands = 0  # in the latest report
        self._unreported: list[tuple[int, RequestKey, _LoadEvent]] = []
        self.sequences = 0
        self.blocks = 0

    @property
    def in_flight(self) -> int:
        """Attempts that run on the worker."""
        return sum(entry.state in _LIVE for entry in self._entries.values())

    @property
    def tokens(self) -> int:
        return sum(self._tokens.values())

    def tokens_up_to(self, size: int) -> int:
        """Those of prompts of a size class and below."""
        return sum(tokens for other, tokens in self._tokens.items() if other <= size)

    def reserve(self, key: RequestKey, *, tokens: int, blocks: int) -> None:
        """An attempt is about to be submitted."""
        if key not in self._entries:
            entry = self._entries[key] = _Reservation(tokens, blocks)
            self._add(entry, 1)

    def submitted(self, key: RequestKey, num_commands: int) -> None:
        """The worker has acknowledged the submit: reports of so many commands include it."""
        self._await(key, num_commands, _LoadEvent.INCLUDED)

    def cancelled(self, keys: Iterable[RequestKey], num_commands: int) -> None:
        """The worker has acknowledged the cancel: reports of so many commands exclude them. 0 when
        no acknowledgement will come."""
        for key in keys:
            self._await(key, num_commands, _LoadEvent.CANCELLED)

    def reported(self, num_commands: int) -> None:
        """A report of load has come."""
        self._num_commands = num_commands
        if not self._unreported:
            return
        covered = [item for item in self._unreported if item[0] <= num_commands]
        self._unreported = [item for item in self._unreported if item[0] > num_commands]
        for _, key, event in sorted(covered, key=lambda item: item[0]):
            self._cover(key, event)

    def computed(self, key: RequestKey) -> None:
        """The first token has come, with a report of what is left."""
        entry = self._entries.get(key)
        if entry is not None and not entry.computed:
            self._cover(key, _LoadEvent.INCLUDED)
            if entry.state is not ReservationState.WITHDRAWN:
                entry.computed, entry.tokens = True, 0

    def release(self, key: RequestKey, *, cancel: bool = False) -> None:
        """The attempt is over. With `cancel` the worker may still report it."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if cancel:
            self._move(entry, _LoadEvent.CANCELLED)
        elif entry.state in _LIVE:
            self._add(entry, -_SIGN[entry.state])
            del self._entries[key]

    def clear(self) -> None:
        """The worker was lost, and its reports with it."""
        self._entries.clear()
        self._tokens.clear()
        self._unreported.clear()
        self._num_commands = self.sequences = self.blocks = 0

    def _await(self, key: RequestKey, num_commands: int, event: _LoadEvent) -> None:
        if key not in self._entries:
            return
        if num_commands <= self._num_commands:
            self._cover(key, event)
        else:
            self._unreported.append((num_commands, key, event))

    def _cover(self, key: RequestKey, event: _LoadEvent) -> None:
        """The report reflects what has happened to an attempt."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if event is _LoadEvent.INCLUDED:
            self._move(entry, event)
        elif entry.state not in _LIVE:
            self._add(entry, -_SIGN[entry.state])
            del self._entries[key]

    def _move(self, entry: _Reservation, event: _LoadEvent) -> None:
        state = _NEXT.get((entry.state, event), entry.state)
        self._add(entry, _SIGN[state] - _SIGN[entry.state])
        entry.state = state

    def _add(self, entry: _Reservation, sign: int) -> None:
        if sign:
            size = size_class(entry.tokens)
            self._tokens[size] = self._tokens.get(size, 0) + sign * entry.tokens
            if not self._tokens[size]:
                del self._tokens[size]
            self.sequences += sign
            self.blocks += sign * entry.blocks
