"""What the step thread of a decode worker is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.ids import RequestKey
from worker_runtime.scheduling import scheduler
from worker_runtime.scheduling.commands import EndHandoff, HandoffEnded


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
class DecodeOutput(scheduler.StepOutput):
    """What one turn of the step thread wants done on the event loop."""

    reserves: list[Reserve] = field(default_factory=list)
    ends: list[EndHandoff] = field(default_factory=list)
