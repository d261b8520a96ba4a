"""Life of a request on a decode worker: transitions, commands that cause them, and outputs.

    after a prefill worker:  AWAITING_GRANT -> RECEIVING -> RUNNING -> GONE
    prefilled here:          WAITING -> RUNNING (prompt in chunks, then decode) -> GONE

Preemption moves RUNNING to WAITING: the KV is computed again here, never requested again. A request
that is cancelled or fails while RECEIVING goes to ENDING: its blocks are quarantined until no write
can be in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from protocol.ids import RequestKey
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry, Transitions
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded, StepOutput

DECODE_TRANSITIONS: Transitions = {
    RequestState.AWAITING_GRANT: frozenset({RequestState.RECEIVING, RequestState.GONE}),
    RequestState.RECEIVING: frozenset({RequestState.RUNNING, RequestState.ENDING}),
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.GONE}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.GONE}),
    RequestState.ENDING: frozenset({RequestState.GONE}),
    RequestState.GONE: frozenset(),
}
#: States that wait for blocks, and those that count for `max_num_seqs`.
QUEUED = frozenset({RequestState.AWAITING_GRANT, RequestState.WAITING})
ADMITTED = frozenset({RequestState.RECEIVING, RequestState.RUNNING})


@dataclass(slots=True)
class DecodeEntry(SchedulerEntry):
    """num_blocks: blocks that it needs while it is queued. retry_at: when a request that found no
    room is matched with the prefix cache again. commit_due: when its commit should be here.
    committed_at: when it came, until the first step with it is planned."""

    transitions = DECODE_TRANSITIONS
    without_blocks = QUEUED | {RequestState.ENDING}

    num_blocks: int = 0
    retry_at: float = 0.0
    commit_due: float = math.inf
    committed_at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnnounced:
    """The commit should come `at` this time of the worker's clock."""

    key: RequestKey
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All KV of the request arrived; decode owns the sequence. Prefill sampled `first_token`."""

    key: RequestKey
    first_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSafe:
    """No write to the blocks of this hand-off can be in flight any more."""

    key: RequestKey


Command = CommitAnnounced | Committed | HandoffEnded | BlocksSafe


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Blocks were allocated for the KV of `num_tokens` tokens: grant them to the prefill worker. A
    table for each KV group."""

    key: RequestKey
    block_tables: tuple[tuple[int, ...], ...]
    num_cached_blocks: int
    num_tokens: int


@dataclass(slots=True)
class DecodeOutput(StepOutput):
    """What one iteration of the step loop hands to the receiver."""

    reserves: list[Reserve] = field(default_factory=list)
    ends: list[EndHandoff] = field(default_factory=list)
