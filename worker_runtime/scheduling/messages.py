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
NON_FINITE = counter_key(metrics.NON_FINITE_ROWS)
PREEMPTIONS = counter_key(metrics.PREEMPTIONS)
PREFIX_CACHE_QUERIES = counter_key(metrics.PREFIX_CACHE_QUERIES)
PREFIX_CACHE_HITS = counter_key(metrics.PREFIX_CACHE_HITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An accepted request. `matcher` holds its grammar, advanced over the output so far; `digests`
    names its first full blocks (worker_runtime.scheduling.prefix_cache)."""

    submit: Submit
    matcher: Matcher | None = None
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The router cancelled these attempts."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGone:
    """A router's event stream ended: its requests are cancelled."""

    router_id: str


RouterCommand = Submitted | RequestCancelled | RouterGone


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnded:
    """The hand-off ended without a commit; without an error it was not needed. On prefill, no read
    of the source blocks is in flight any more."""

    key: RequestKey
    error: ErrorInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHandoff:
    """Request to the event loop: end the hand-off on the other worker too."""

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
    """What one iteration of the step loop hands to the event loop."""

    events: dict[str, RouterEvents] = field(default_factory=dict)

    def events_for(self, router_id: str) -> RouterEvents:
        return self.events.setdefault(router_id, RouterEvents())

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a scheduler after an iteration. `cache`: digests added to (True) or removed from
    (False) its prefix cache since the snapshot before."""

    load: WorkerLoad = field(default_factory=WorkerLoad)
    num_unfinished: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    cache: Mapping[bytes, bool] = field(default_factory=dict)
