"""What the step thread of a decode worker is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from worker_runtime.outlet import RouterEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All KV of the request arrived; decode owns the sequence. `first_token` was made by
    prefill."""

    key: RequestKey
    first_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnded:
    """The hand-off is over without a commit; without an error it was simply not needed."""

    key: RequestKey
    error: ErrorInfo | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHandoff:
    """Tell the prefill worker that the hand-off is over."""

    key: RequestKey
    released: bool
    error: ErrorInfo | None


@dataclass(slots=True)
class Output:
    """What one turn of the step thread wants done on the event loop."""

    events: dict[str, RouterEvents] = field(default_factory=dict)
    reserves: list[Reserve] = field(default_factory=list)
    ends: list[EndHandoff] = field(default_factory=list)

    def of(self, router_id: str) -> RouterEvents:
        """The events for one router."""
        return self.events.setdefault(router_id, RouterEvents())

    def __bool__(self) -> bool:
        return bool(self.events or self.reserves or self.ends)
