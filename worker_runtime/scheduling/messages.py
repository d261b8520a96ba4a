"""Values that go into a scheduler (commands) and come out of it (events, hand-off requests)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grammar.matcher import Matcher
from observability import metrics
from observability.metrics import counter_key
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import (
    FailEvent,
    PromptEvent,
    ScoreEvent,
    SpanEvent,
    Submit,
    TokenEvent,
    WorkerLoad,
)

#: Keys of the counters that schedulers keep.
FINISHED = counter_key(metrics.WORKER_REQUESTS, outcome="finished")
FAILED = counter_key(metrics.WORKER_REQUESTS, outcome="failed")
#: Ended by the other worker: at token 1 on prefill, or because the client left.
RELEASED = counter_key(metrics.WORKER_REQUESTS, outcome="released")
CANCELLED = counter_key(metrics.WORKER_REQUESTS, outcome="cancelled")
PREEMPTIONS = counter_key(metrics.PREEMPTIONS)
PREFIX_CACHE_QUERIES = counter_key(metrics.PREFIX_CACHE_QUERIES)
PREFIX_CACHE_HITS = counter_key(metrics.PREFIX_CACHE_HITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request was accepted. `matcher` is its grammar's, at the output it has so far."""

    submit: Submit
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """These attempts are not wanted any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGone:
    """The router's stream ended: nobody listens to its requests."""

    router_id: str


RouterCommand = Submitted | RequestCancelled | RouterGone


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnded:
    """The hand-off is over without a commit; without an error it was simply not needed. On prefill
    no read of the source blocks is in flight any more."""

    key: RequestKey
    error: ErrorInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHandoff:
    """Asked for: tell the other worker that the hand-off is over."""

    key: RequestKey
    released: bool
    error: ErrorInfo | None


@dataclass(slots=True, kw_only=True)
class RouterEvents:
    """Events of one step for one router."""

    tokens: list[TokenEvent] = field(default_factory=list)
    scores: list[ScoreEvent] = field(default_factory=list)
    failures: list[FailEvent] = field(default_factory=list)
    spans: list[SpanEvent] = field(default_factory=list)
    prompts: list[PromptEvent] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What one turn of the step thread wants done on the event loop."""

    events: dict[str, RouterEvents] = field(default_factory=dict)

    def of(self, router_id: str) -> RouterEvents:
        """The events for one router."""
        return self.events.setdefault(router_id, RouterEvents())

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a scheduler is like after a turn. `cache`: digests that have come to (True) or gone from
    (False) its prefix cache since the turn before."""

    load: WorkerLoad = field(default_factory=WorkerLoad)
    num_unfinished: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    cache: Mapping[bytes, bool] = field(default_factory=dict)
