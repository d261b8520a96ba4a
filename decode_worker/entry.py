"""A request on a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.scheduling import scheduler


class DecodeState(StrEnum):
    """Where a sequence is on this worker."""

    WAITING_ROOM = "waiting_room"
    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


#: Sequences that have no blocks yet, those that take a place in the batch, and those whose tokens
#: are computed here.
WAITING = (DecodeState.WAITING, DecodeState.WAITING_ROOM)
ADMITTED = (DecodeState.RUNNING, DecodeState.ARRIVING)
COMPUTED_HERE = (DecodeState.WAITING, DecodeState.RUNNING)


@dataclass(slots=True)
class DecodeEntry(scheduler.SchedulerEntry):
    """While it waits it needs `needed` blocks, and one that found no room is looked at more closely
    again at `look_again`."""

    state: DecodeState
    needed: int
    look_again: float = 0.0

    @property
    def ending(self) -> bool:
        """Whether it waits for its blocks to be safe."""
        return self.state is DecodeState.ENDING
