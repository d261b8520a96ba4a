"""A request on a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worker_runtime.scheduling import scheduler


class PrefillState(StrEnum):
    """Where a sequence is on this worker."""

    EXPECTING = "expecting"
    GRANTED = "granted"
    RUNNING = "running"
    SENDING = "sending"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class PrefillEntry(scheduler.SchedulerEntry):
    """`pushed` counts blocks handed to the sender, `num_found` tokens of one that has not started
    were in the cache when it came."""

    state: PrefillState
    num_found: int = 0
    pushed: int = 0
    granted_at: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0

    @property
    def ending(self) -> bool:
        """Whether it waits until no read of its blocks is in flight."""
        return self.state is PrefillState.ENDING
