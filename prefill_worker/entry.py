"""A request on a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.sequence import Sequence


class State(StrEnum):
    """Where a sequence is on this worker."""

    EXPECTING = "expecting"
    GRANTED = "granted"
    RUNNING = "running"
    SENDING = "sending"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class Entry:
    """A sequence with its state; `order` is its seniority, `pushed` counts blocks handed to the
    sender, `num_found` tokens of one that has not started were in the cache when it came."""

    sequence: Sequence
    state: State
    order: int
    num_found: int = 0
    pushed: int = 0
    granted_at: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0

    @property
    def router_id(self) -> str:
        """Who is told about it."""
        return self.sequence.submit.router_id
