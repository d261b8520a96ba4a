"""Sequences on their way to another worker while they run. Pure.

Full blocks never change, so they are sent while the sequence decodes. Then it stops, its last
steps land, and the commit carries the tokens that the receiver does not know; the receiver computes
the KV behind the full blocks in one step. Until the commit is acknowledged the sequence is this
worker's.
"""

from __future__ import annotations

from collections.abc import Iterable

from decode_worker.lifecycle import DecodeEntry, Departure
from protocol.errors import HandoffFailed
from protocol.ids import RequestKey
from worker_runtime.scheduling.entry import RequestState
from worker_runtime.scheduling.messages import (
    CommitHandoff,
    EndHandoff,
    Granted,
    MoveOut,
    Push,
    SendOrder,
)

Sends = list[SendOrder]


class Departures:
    """The departing sequences by the key of their hand-off. Each method returns what the sender has
    to do."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[RequestKey, DecodeEntry] = {}

    def find(self, key: RequestKey) -> DecodeEntry | None:
        """The sequence that leaves by this hand-off."""
        return self._entries.get(key)

    def begin(self, entry: DecodeEntry | None, command: MoveOut) -> Sends:
        """Offer a running sequence to another worker; refused while it does not decode."""
        if entry is None or not _decodes(entry) or entry.departure is not None:
            return _refusal(command.to, "the sequence does not run here")
        entry.departure = Departure(key=command.to, num_output=command.num_output)
        entry.keeps_window = True
        self._entries[command.to] = entry
        return []

    def granted(self, entry: DecodeEntry, grant: Granted) -> Sends:
        """The receiver has blocks: send the full ones."""
        departure, tables = entry.departure, entry.sequence.tables
        assert departure is not None
        if entry.state is not RequestState.RUNNING:
            return []
        num_tokens, size = grant.num_tokens, self._block_size
        seen = [tables.first_seen(group, num_tokens) for group in range(len(tables.groups))]
        if num_tokens > entry.sequence.num_computed or any(
            first > number for first, number in zip(tables.first, seen, strict=True)
        ):
            return _refusal(departure.key, "KV before the window is gone")
        first, end = grant.num_cached_tokens // size, -(-num_tokens // size)
        pushes: Sends = []
        for group, number in enumerate(seen):
            start = max(first, number)
            if start < end:
                ids = tables.part(group, start, end)
                pushes.append(
                    Push(key=departure.key, group=group, block_ids=ids, first_block=start, after=0)
                )
        return pushes or self.stop(entry)

    def stop(self, entry: DecodeEntry) -> Sends:
        """All full blocks are sent: run no further step, and commit when the last has landed."""
        if entry.state is not RequestState.RUNNING:
            return []
        entry.move(RequestState.SENDING)
        return self.landed(entry)

    def landed(self, entry: DecodeEntry) -> Sends:
        """A step of a sequence that has stopped has landed."""
        sequence, departure = entry.sequence, entry.departure
        assert departure is not None
        if entry.state is not RequestState.SENDING or sequence.in_flight:
            return []
        known = len(sequence.submit.prompt_ids) + departure.num_output
        return [CommitHandoff(key=departure.key, tokens=tuple(sequence.tokens[known:]))]

    def end(self, entry: DecodeEntry) -> None:
        """The hand-off is over, and no read of its blocks is in flight."""
        assert entry.departure is not None
        del self._entries[entry.departure.key]
        entry.departure = None


def kept_in_vain(entries: Iterable[DecodeEntry]) -> list[int]:
    """Have sequences that are not on their way give up what they keep behind their windows for
    another try: the blocks."""
    blocks: list[int] = []
    for entry in entries:
        if entry.keeps_window and entry.departure is None:
            entry.keeps_window = False
            blocks += entry.sequence.tables.drop_unseen(entry.sequence.num_computed)
    return blocks


def _decodes(entry: DecodeEntry) -> bool:
    """Whether the KV of all its tokens is here but for the last ones, which steps add."""
    sequence = entry.sequence
    decodes = sequence.num_launched >= len(sequence.tokens) - 1 and sequence.num_output > 0
    return entry.state is RequestState.RUNNING and decodes


def _refusal(key: RequestKey, text: str) -> Sends:
    return [EndHandoff(key=key, released=False, error=HandoffFailed(text).info())]
