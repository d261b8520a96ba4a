"""Life of a request whose prompt a worker computes for another.

    AWAITING_GRANT -> GRANTED -> RUNNING (in chunks) -> SENDING -> GONE

A request that is cancelled, fails or finishes here goes to ENDING: its blocks stay held until the
sender reports that no read is in flight. Nothing is held before decode has granted blocks, so a
full decode pool never pins memory here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.control.listeners import TransferReport
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry, Transitions

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
    progress_at: float = 0.0
    report: TransferReport | None = None

    @property
    def untouched(self) -> bool:
        waits = self.state in (RequestState.AWAITING_GRANT, RequestState.GRANTED)
        return waits and not self.num_cached and self.sequence.fetch is None
