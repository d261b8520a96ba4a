"""What this router has asked of one worker and the worker's own reports may not show yet."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import RequestKey


@dataclass(slots=True, kw_only=True)
class _Entry:
    tokens: int
    blocks: int
    acknowledged: bool = False
    unseen: bool = True
    pending: bool = True


class Reservations:
    """Counts of one worker, by attempt.

    An entry is

    - in flight from `reserve` to `release`,
    - unseen until the first report of load after the worker acknowledged it,
    - pending (its blocks) until its first token, when its blocks are surely in the report.

    Every step is idempotent and unknown keys are ignored, so no mix of failures lets a count leak
    or go negative.
    """

    def __init__(self) -> None:
        self._entries: dict[RequestKey, _Entry] = {}
        self._acknowledged: list[RequestKey] = []
        self.unseen_sequences = 0
        self.unseen_tokens = 0
        self.pending_blocks = 0

    @property
    def in_flight(self) -> int:
        """Attempts this worker takes part in."""
        return len(self._entries)

    def reserve(self, key: RequestKey, *, tokens: int, blocks: int) -> None:
        """An attempt is about to be submitted."""
        if key not in self._entries:
            self._entries[key] = _Entry(tokens=tokens, blocks=blocks)
            self.unseen_sequences += 1
            self.unseen_tokens += tokens
            self.pending_blocks += blocks

    def acknowledge(self, key: RequestKey) -> None:
        """The worker has taken it; the next report includes it."""
        entry = self._entries.get(key)
        if entry is not None and entry.unseen and not entry.acknowledged:
            entry.acknowledged = True
            self._acknowledged.append(key)

    def reported(self) -> None:
        """A report of load has come."""
        if self._acknowledged:
            keys, self._acknowledged = self._acknowledged, []
            for key in keys:
                self._see(self._entries.get(key))

    def settle(self, key: RequestKey) -> None:
        """Its first token has come: its blocks are allocated."""
        entry = self._entries.get(key)
        if entry is not None and entry.pending:
            entry.pending = False
            self.pending_blocks -= entry.blocks

    def release(self, key: RequestKey) -> None:
        """The attempt is over."""
        self.settle(key)
        self._see(self._entries.pop(key, None))

    def _see(self, entry: _Entry | None) -> None:
        if entry is not None and entry.unseen:
            entry.unseen = False
            self.unseen_sequences -= 1
            self.unseen_tokens -= entry.tokens
