"""A request on a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from worker_runtime.sequence import Sequence


class State(StrEnum):
    """Where a sequence is on this worker."""

    WAITING_ROOM = "waiting_room"
    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


#: Sequences that have no blocks yet, and those that take a place in the batch.
WAITING = (State.WAITING, State.WAITING_ROOM)
ADMITTED = (State.RUNNING, State.ARRIVING)


@dataclass(slots=True)
class Entry:
    """A sequence with its state; `order` is its seniority (first arrived is served first). While it
    waits it needs `needed` blocks, and one that found no room is looked at more closely again at
    `look_again`."""

    sequence: Sequence
    state: State
    order: int
    needed: int
    look_again: float = 0.0
    rank: tuple[int, int] = field(init=False)  # who is served first

    def __post_init__(self) -> None:
        self.rank = -self.sequence.submit.priority, self.order

    @property
    def router_id(self) -> str:
        """Who is told about it."""
        return self.sequence.submit.router_id
