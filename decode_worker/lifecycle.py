"""Life of a request on a decode worker: states, commands that change them, and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.ids import RequestKey
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded, StepOutput
from worker_runtime.scheduling.scheduler import SchedulerEntry


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
class DecodeEntry(SchedulerEntry):
    """While it waits it needs `needed` blocks, and one that found no room is looked at more closely
    again at `look_again`."""

    state: DecodeState
    needed: int
    look_again: float = 0.0

    @property
    def ending(self) -> bool:
        """Whether it waits for its blocks to be safe."""
        return self.state is DecodeState.ENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All KV of the request arrived; decode owns the sequence. `first_token` was made by
    prefill."""

    key: RequestKey
    first_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSafe:
    """No write can be in flight to the blocks of this hand-off any more."""

    key: RequestKey


Command = Committed | HandoffEnded | BlocksSafe


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Blocks were set aside for the KV of `num_tokens` tokens: grant them to the prefill worker."""

    key: RequestKey
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    num_tokens: int


@dataclass(slots=True)
class DecodeOutput(StepOutput):
    """What one turn of the step thread wants done on the event loop."""

    reserves: list[Reserve] = field(default_factory=list)
    ends: list[EndHandoff] = field(default_factory=list)
