"""What a router knows of one worker beyond its load report. Pure.

Reservations: attempts that the report does not show yet. PrefixView: what its prefix cache holds.
CircuitBreaker: how often it fails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from protocol.ids import RequestKey
from protocol.kv_layout import (
    CacheChange,
    KVFingerprint,
    chain_seed,
    extend_chain,
    hints,
    split_hints,
)
from protocol.messages import size_class
from router.workers.hint_set import HintSet
from router.workers.holders import MARK_BITS, marks


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

    Report and reservations add up to one account of outstanding work: an attempt counts here from
    its submit until a report includes it, and a cancelled one is taken off until a report excludes
    it. Reports and acknowledgements carry a number of commands (protocol.messages.WorkerLoad), so
    their order of arrival does not matter. Every call is idempotent and ignores unknown keys, so no
    mix of failures leaks a count.
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
        return sum(entry.state in _LIVE for entry in self._entries.values())

    @property
    def tokens(self) -> int:
        return sum(self._tokens.values())

    def tokens_up_to(self, size: int) -> int:
        """Those of prompts of a size class and below."""
        return sum(tokens for other, tokens in self._tokens.items() if other <= size)

    def reserve(self, key: RequestKey, *, tokens: int, blocks: int) -> None:
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


class PromptBlocks:
    """The hints (short hashes) of a prompt's full blocks, made once per kind of worker in half a
    microsecond a block. The outputs of one prompt share them."""

    def __init__(self, prompt_ids: Sequence[int], salt: str = "") -> None:
        self.num_tokens = len(prompt_ids)
        self._ids = prompt_ids
        self._salt = salt
        self._hints: dict[tuple[KVFingerprint, int], tuple[int, ...]] = {}
        self._marks: dict[tuple[KVFingerprint, int], list[int]] = {}

    def marks(self, fingerprint: KVFingerprint, block_size: int) -> list[int]:
        """The marks (router.workers.holders) among the hints."""
        kind = fingerprint, block_size
        known = self._marks.get(kind)
        if known is None:
            known = self._marks[kind] = marks(self.hints(fingerprint, block_size))
        return known

    def hints(self, fingerprint: KVFingerprint, block_size: int) -> tuple[int, ...]:
        """The hints for workers of this fingerprint and block size."""
        kind = fingerprint, block_size
        known = self._hints.get(kind)
        if known is None:
            digests: list[bytes] = []
            seed = chain_seed(fingerprint, self._salt)
            extend_chain(digests, self._ids, block_size=block_size, seed=seed)
            known = self._hints[kind] = split_hints(hints(digests))
        return known


class PrefixView:
    """The prefix cache of one incarnation of a worker by its reports, and the blocks that requests
    in flight will add. All of it is advice: after a stale view or a hash collision a worker
    computes more than another would have."""

    def __init__(self, on_mark: Callable[[int, bool], None] = lambda _mark, _here: None) -> None:
        """`on_mark`: told of each mark (router.workers.holders) that comes or goes."""
        self.reports = False  # a worker without a prefix cache never reports
        self._on_mark = on_mark
        self._held = HintSet()
        self._expected: Counter[int] = Counter()
        self._by_request: dict[RequestKey, Sequence[int]] = {}

    def take(self, change: CacheChange) -> None:
        self.reports = True
        if change.reset:
            self._clear()
        self._held.change(added=change.added, removed=change.removed)
        for mark in marks(split_hints(change.removed)):
            self._tell(mark)
        for mark in marks(split_hints(change.added)):
            self._on_mark(mark, True)

    def forget(self) -> None:
        """The worker is disconnected; it reports everything anew."""
        self.reports = False
        self._clear()

    def _clear(self) -> None:
        held = self._held.without_bits(MARK_BITS)
        self._held.clear()
        for mark in held:
            self._tell(mark)

    def _tell(self, mark: int) -> None:
        self._on_mark(mark, self.has(mark))

    def expect(self, key: RequestKey, blocks: Sequence[int]) -> None:
        """A request with these blocks is submitted there. Undone by `release`."""
        if self.reports and key not in self._by_request:
            new = blocks[self.num_held(blocks) :]
            self._by_request[key] = new
            self._expected.update(new)
            for mark in marks(new):
                self._on_mark(mark, True)

    def release(self, key: RequestKey) -> None:
        """The request has ended. Idempotent."""
        blocks = self._by_request.pop(key, ())
        for block in blocks:
            self._expected[block] -= 1
            if not self._expected[block]:
                del self._expected[block]
        for mark in marks(blocks):
            self._tell(mark)

    def has(self, block: int) -> bool:
        """Whether a block is cached or expected."""
        return block in self._held or block in self._expected

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many leading `blocks` are cached."""
        return _leading(blocks, self._held.__contains__)

    def num_expected(self, blocks: Sequence[int]) -> int:
        """How many leading `blocks` are cached or expected."""
        return _leading(blocks, self.has)

    def counts(self, blocks: Sequence[int]) -> tuple[int, int]:
        """num_held and num_expected."""
        held = self.num_held(blocks)
        return held, self.num_expected(blocks) if self._expected else held


def _leading(blocks: Sequence[int], known: Callable[[int], bool]) -> int:
    """Length of the leading run of known blocks, by bisection: a worker that has a block has those
    before it, with rare and harmless exceptions."""
    if not blocks or not known(blocks[0]):
        return 0
    return bisect_left(blocks, True, key=lambda block: not known(block))


#: Failures less successes that open the breaker.
_MAX_FAILURES = 3
#: A failure counts for so long.
_MEMORY_S = 30.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class BreakerState(StrEnum):
    """What a worker may be given."""

    CLOSED = "closed"  # requests
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one request at a time


class _BreakerEvent(Enum):
    FAILED = auto()  # too often, or the probe
    PAUSED = auto()  # for long enough
    SUCCEEDED = auto()  # the probe, or its output began


_NEXT_BREAKER = {
    (BreakerState.CLOSED, _BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.OPEN, _BreakerEvent.PAUSED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, _BreakerEvent.SUCCEEDED): BreakerState.CLOSED,
}


class CircuitBreaker:
    """Keeps requests from a worker that keeps failing them, and that would draw the traffic because
    it has few sequences. After a few failures the breaker opens: no requests for a while, then one
    at a time until one begins its output; until outputs end well, one more failure opens it again,
    for longer. `now` is in seconds on any steady clock."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._last_failure = self._open_until = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._probe: RequestKey | None = None

    def allows(self, now: float) -> bool:
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self.state = _NEXT_BREAKER[self.state, _BreakerEvent.PAUSED]
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.HALF_OPEN and self._probe is None
        )

    def started(self, key: RequestKey) -> None:
        """An attempt goes to the worker."""
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = key

    def ended(self, key: RequestKey) -> None:
        """It is over, with or without an outcome."""
        if self._probe == key:
            self._probe = None

    def began(self, key: RequestKey, now: float) -> None:
        """The first token of an attempt has come. Its last may take minutes."""
        if self.state is BreakerState.HALF_OPEN and key == self._probe:
            self.state = _NEXT_BREAKER[self.state, _BreakerEvent.SUCCEEDED]
            self._failures, self._last_failure, self._probe = _MAX_FAILURES - 1, now, None
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def succeeded(self, key: RequestKey) -> None:
        """The worker did its part of an attempt."""
        self._failures = max(0, self._failures - 1)
        if self.state is BreakerState.HALF_OPEN and key == self._probe:
            self.state = _NEXT_BREAKER[self.state, _BreakerEvent.SUCCEEDED]
            self._failures = 0
        if self.state is BreakerState.CLOSED and not self._failures:
            self._pause_s = _FIRST_PAUSE_S

    def failed(self, key: RequestKey, now: float) -> None:
        """The worker failed an attempt, or refused it though it is not full."""
        recent = self._failures if now <= self._last_failure + _MEMORY_S else 0
        self._failures, self._last_failure = recent + 1, now
        if self.state is BreakerState.HALF_OPEN and key == self._probe:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        elif self.state is not BreakerState.CLOSED or self._failures < _MAX_FAILURES:
            return  # an attempt from before the pause does not prolong it
        self.state = _NEXT_BREAKER[self.state, _BreakerEvent.FAILED]
        self._open_until = now + self._pause_s
