"""Values that go into a scheduler (commands) and come out of it (events, hand-off requests)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grammar.matcher import Matcher
from kv_tiers.commands import Copy, CopyKind, CopyResult, Tier
from kv_transfer.control.listeners import TransferReport
from observability import metrics
from observability.metrics import counter_key
from protocol.errors import ErrorInfo
from protocol.ids import RequestKey, Role
from protocol.loads import TierLoad
from protocol.messages import (
    FailEvent,
    PrefixSource,
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
#: Handed over to another worker while it ran.
MOVED = counter_key(metrics.WORKER_REQUESTS, outcome="moved")
#: Ended by the other worker: at token 1 on prefill, or because the client left.
RELEASED = counter_key(metrics.WORKER_REQUESTS, outcome="released")
CANCELLED = counter_key(metrics.WORKER_REQUESTS, outcome="cancelled")
#: To the router, before anything of its prompt was computed.
GIVEN_BACK = counter_key(metrics.WORKER_REQUESTS, outcome="given_back")
NON_FINITE = counter_key(metrics.NON_FINITE_ROWS)
PREEMPTIONS = counter_key(metrics.PREEMPTIONS)
HELD = counter_key(metrics.HELD_TOKENS)
PREFIX_CACHE_QUERIES = counter_key(metrics.PREFIX_CACHE_QUERIES)
PREFIX_CACHE_HITS = counter_key(metrics.PREFIX_CACHE_HITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An accepted request, and the role in which this worker serves it. `matcher` holds its
    grammar, advanced over the output so far; `digests` names its first full blocks
    (worker_runtime.scheduling.prefix_cache). `at`: when it came, infinity for now: the grammar may
    have taken a while to compile, and the step thread to look."""

    submit: Submit
    role: Role = Role.DECODE
    matcher: Matcher | None = None
    digests: tuple[bytes, ...] = ()
    at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The router cancelled these attempts; with `unless_begun` it wants them back."""

    keys: tuple[RequestKey, ...]
    unless_begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGone:
    """A router's event stream ended: its requests are cancelled."""

    router_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDone:
    """A copy of the KV tiers has ended on every rank."""

    number: int
    result: CopyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesListed:
    """The segments that are on disk now, of any worker. `bytes_per_second`: of a disk that was just
    measured, as each rank reads it; 0: it was not."""

    names: frozenset[bytes]
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """Another worker asks for the KV of the blocks that `digests` names. If all of it is here,
    `granted` holds."""

    digests: tuple[bytes, ...]
    granted: Granted


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Borrower: the lender keeps the KV of the first `num_tokens` tokens, fewer than were granted,
    and the blocks of the grant are free of it. Lender: it keeps so many."""

    key: RequestKey
    num_tokens: int


RouterCommand = Submitted | RequestCancelled | RouterGone
TierCommand = CopyDone | FilesListed
LoanCommand = Lend | Lent


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChanged:
    """Routers give the worker the work of another role from now on."""

    role: Role


# --- commands of the hand-off ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOut:
    """The running sequence `key` moves to another worker, which knows it as `to` and knows its
    first `num_output` output tokens (protocol.messages.MoveRequest)."""

    key: RequestKey
    to: RequestKey
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """To the sender: the receiver holds blocks for the KV of `num_tokens` tokens; it has that of
    the first `num_cached_tokens`."""

    key: RequestKey
    num_cached_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """To the sender of a running sequence: all pushed blocks are sent."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """To the sender: all KV arrived; the receiver owns the sequence."""

    key: RequestKey
    report: TransferReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnnounced:
    """To the receiver: the commit should come `at` this time of the worker's clock."""

    key: RequestKey
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """To the receiver: all KV of the request arrived, and it owns the sequence. The sender sampled
    `tokens`, which follow those submitted; `held`: as in protocol.messages.Commit."""

    key: RequestKey
    tokens: tuple[int, ...]
    held: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSafe:
    """To the receiver: no write to the blocks of this hand-off can be in flight any more."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEnded:
    """The hand-off ended without a commit; without an error it was not needed. On the sender, no
    read of the source blocks is in flight any more; `uncertain`: the receiver may own the
    sequence."""

    key: RequestKey
    error: ErrorInfo | None
    uncertain: bool = False


HandoffCommand = (
    MoveOut | Granted | Sent | Delivered | CommitAnnounced | Committed | BlocksSafe | HandoffEnded
)

Command = RouterCommand | RoleChanged | HandoffCommand | TierCommand | LoanCommand

# --- requests to the event loop -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Send these blocks of a KV group, number first_block .. of the sequence. They are complete
    once the engine's step `after` is over (0: now)."""

    key: RequestKey
    group: int
    block_ids: tuple[int, ...]
    first_block: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceCommit:
    """The last chunk of a prompt was launched; token 1 is known `at` about that time."""

    key: RequestKey
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHandoff:
    """All blocks were pushed, and the tokens after them are known. `held`: as in Commit."""

    key: RequestKey
    tokens: tuple[int, ...]
    held: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHandoff:
    """End the hand-off on the other worker too."""

    key: RequestKey
    released: bool
    error: ErrorInfo | None


SendOrder = Push | AnnounceCommit | CommitHandoff | EndHandoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Blocks were allocated for the KV of `num_tokens` tokens: grant them to the sender. A table
    for each KV group."""

    key: RequestKey
    block_tables: tuple[tuple[int, ...], ...]
    num_cached_blocks: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrow:
    """Ask the source of the sequence of `submit` for the KV of its first blocks, `names`, into the
    blocks of `reserve`."""

    source: PrefixSource
    submit: Submit
    names: tuple[bytes, ...]
    reserve: Reserve


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
    """What one iteration of the step loop hands to the event loop. Each list is carried out in its
    order: `sends` by the sender of the worker's hand-offs, `reserves` and `ends` by the
    receiver, `copies` by the KV tiers. `borrows` and `lent` are between workers: questions, and
    answers to those of others."""

    events: dict[str, RouterEvents] = field(default_factory=dict)
    sends: list[SendOrder] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    ends: list[EndHandoff] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    borrows: list[Borrow] = field(default_factory=list)
    lent: list[Lent] = field(default_factory=list)

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
    tiers: tuple[TierLoad, ...] = ()


_COPIED = {
    CopyKind.STORE: (Tier.HOST, "in"),
    CopyKind.LOAD: (Tier.HOST, "out"),
    CopyKind.WRITE: (Tier.DISK, "in"),
    CopyKind.READ: (Tier.DISK, "out"),
}


_DISK_EVICTIONS = counter_key(metrics.KV_TIER_EVICTIONS, tier=Tier.DISK.value)


class TierCounters:
    """Use of the KV tiers since the start."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def hit(self, tiers: Iterable[Tier] | Mapping[Tier, int], block_size: int) -> None:
        """Blocks that a sequence got from these tiers."""
        for tier, count in Counter(tiers).items():
            key = counter_key(metrics.KV_TIER_HITS, tier=tier.value)
            self._counts[key] += count * block_size

    def copied(self, kind: CopyKind, result: CopyResult) -> None:
        """A copy has ended."""
        if kind not in _COPIED:
            return
        tier, direction = _COPIED[kind]
        if result.num_evicted:
            self._counts[_DISK_EVICTIONS] += result.num_evicted
        if result.ok:
            key = counter_key(metrics.KV_TIER_BYTES, tier=tier.value, direction=direction)
            self._counts[key] += result.num_bytes
        else:
            cause = "damaged" if result.damaged else "failed"
            self._counts[counter_key(metrics.KV_TIER_FAILURES, tier=tier.value, cause=cause)] += 1

    def borrowed(self, num_bytes: int | None) -> None:
        """A peer's KV has come; None: it has not."""
        if num_bytes is None:
            key = counter_key(metrics.KV_TIER_FAILURES, tier=Tier.PEER.value, cause="failed")
            self._counts[key] += 1
        else:
            key = counter_key(metrics.KV_TIER_BYTES, tier=Tier.PEER.value, direction="out")
            self._counts[key] += num_bytes

    def refuse(self, tier: Tier, reason: str) -> None:
        """A tier was not used, or given up."""
        self._counts[counter_key(metrics.KV_TIER_REFUSALS, tier=tier.value, reason=reason)] += 1

    def read(self) -> Mapping[str, int]:
        return self._counts
