"""Life of a request on a prefill worker: transitions, commands that cause them, and outputs.

    AWAITING_GRANT -> GRANTED -> RUNNING (in chunks) -> SENDING -> GONE

A request that is cancelled, fails or finishes here goes to ENDING: its blocks stay held until the
sender reports that no read is in flight. Nothing is held before decode has granted blocks, so a
full decode pool never pins memory here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.control.listeners import TransferReport
from protocol.ids import RequestKey
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry, Transitions
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded, StepOutput

PREFILL_TRANSITIONS: Transitions = {
    RequestState.AWAITING_GRANT: frozenset(
        {RequestState.GRANTED, RequestState.ENDING, RequestState.GONE}
    ),
    RequestState.GRANTED: frozenset({RequestState.RUNNING, RequestState.ENDING, RequestState.GONE}),
    RequestState.RUNNING: frozenset({RequestState.SENDING, RequestState.ENDING, RequestState.GONE}),
    RequestState.SENDING: frozenset({RequestState.ENDING, RequestState.GONE}),
    RequestState.ENDING: frozenset({RequestState.GONE}),
    RequestState.GONE: frozenset(),
}


@dataclass(slots=True)
class PrefillEntry(SchedulerEntry):
    """num_cached: tokens found in the prefix cache on arrival, until it starts. num_pushed: blocks
    handed to the sender. num_reserved: blocks that it may hold at a time, while it holds any, with
    KV windows. progress_at: time of the grant or of its last chunk."""

    transitions = PREFILL_TRANSITIONS
    without_blocks = frozenset({RequestState.AWAITING_GRANT, RequestState.GRANTED})

    num_cached: int = 0
    num_pushed: int = 0
    num_reserved: int = 0
    granted_at: float = 0.0
    progress_at: float = 0.0
    report: TransferReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Decode holds blocks for the request; it has the KV of the first `num_cached_tokens`."""

    key: RequestKey
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """All KV arrived; decode owns the sequence."""

    key: RequestKey
    report: TransferReport


Command = Granted | Delivered | HandoffEnded


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
    """The last chunk was launched; token 1 is known in about `in_s` seconds."""

    key: RequestKey
    in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHandoff:
    """All blocks were pushed and token 1 is known."""

    key: RequestKey
    first_token: int


HandoffAction = Push | AnnounceCommit | CommitHandoff | EndHandoff


@dataclass(slots=True)
class PrefillOutput(StepOutput):
    """`handoffs` are carried out in this order."""

    handoffs: list[HandoffAction] = field(default_factory=list)
