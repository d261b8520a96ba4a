"""What takes a worker's events of one attempt."""

from __future__ import annotations

from typing import Protocol

from protocol.ids import Role, WorkerRef
from protocol.messages import FailEvent, PromptEvent, ScoreEvent, SpanEvent, TokenEvent

#: What a worker tells of an attempt besides tokens: cached prompt tokens, log-probabilities of the
#: prompt, spans after prefill's commit, and that it gave the attempt up.
AttemptEvent = PromptEvent | ScoreEvent | SpanEvent | FailEvent


class EventSink(Protocol):
    """Receives the events of one attempt, on the router's event loop."""

    def on_token(self, event: TokenEvent, role: Role) -> None: ...

    def on_event(self, event: AttemptEvent, ref: WorkerRef) -> None: ...

    def on_lost(self, ref: WorkerRef, reason: str) -> None:
        """The worker's event stream broke."""

    def on_unload(self) -> None:
        """The worker drains, leaves, or has another role now."""

    def relocate(self) -> bool:
        """Move to another worker if that is possible now; whether a move has begun."""
