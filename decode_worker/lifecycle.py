"""Life of a request that a worker decodes.

    after another worker:  AWAITING_GRANT -> RECEIVING -> RUNNING -> GONE
    prefilled here:        WAITING -> RUNNING (prompt in chunks, then decode) -> GONE
    moves away:            RUNNING (its full blocks are sent) -> SENDING (the rest) -> GONE

Preemption moves RUNNING to WAITING: the KV is computed again here, never requested again. A request
that is cancelled or fails while RECEIVING goes to ENDING: its blocks are quarantined until no write
can be in flight. One that ends while it moves away goes there, too: until no read is in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.ids import RequestKey
from protocol.timeline import Phase, Span
from worker_runtime.scheduling.entry import RequestState, SchedulerEntry, Transitions

DECODE_TRANSITIONS: Transitions = {
    RequestState.AWAITING_GRANT: frozenset({RequestState.RECEIVING, RequestState.GONE}),
    RequestState.RECEIVING: frozenset({RequestState.RUNNING, RequestState.ENDING}),
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.GONE}),
    RequestState.RUNNING: frozenset(
        {RequestState.WAITING, RequestState.SENDING, RequestState.ENDING, RequestState.GONE}
    ),
    RequestState.SENDING: frozenset({RequestState.RUNNING, RequestState.ENDING, RequestState.GONE}),
    RequestState.ENDING: frozenset({RequestState.GONE}),
    RequestState.GONE: frozenset(),
}
#: States that wait for blocks, and those that count for `max_num_seqs`.
QUEUED = frozenset({RequestState.AWAITING_GRANT, RequestState.WAITING})
ADMITTED = frozenset({RequestState.RECEIVING, RequestState.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A sequence is on its way to another worker: the key of its hand-off, and how many of its
    output tokens the receiver knows."""

    key: RequestKey
    num_output: int


@dataclass(slots=True)
class DecodeEntry(SchedulerEntry):
    """num_blocks: blocks that it needs while it is queued. retry_at: when a request that found no
    room is matched with the prefix cache again. announced_at: when the prefill worker should have
    token 1. commit_due: when its commit should be here. committed_at: when it came, until the first
    step with it is planned. departure: while it moves to another worker."""

    transitions = DECODE_TRANSITIONS
    without_blocks = QUEUED | {RequestState.ENDING}

    num_blocks: int = 0
    retry_at: float = 0.0
    announced_at: float | None = None
    commit_due: float = math.inf
    committed_at: float = math.inf
    departure: Departure | None = None

    @property
    def stays(self) -> bool:
        """Whether it runs, and is not on its way to another worker."""
        return self.state is RequestState.RUNNING and self.departure is None

    @property
    def untouched(self) -> bool:
        sequence, submit = self.sequence, self.sequence.submit
        waits = self.state in (RequestState.WAITING, RequestState.RUNNING)
        alone = submit.peer is None and submit.source is None
        fresh = alone and not sequence.num_launched and not sequence.num_output
        brought = sequence.loading is not None or sequence.fetch is not None
        return waits and fresh and not brought and not sequence.stats.num_preemptions

    def spans(self, place: str, num_blocks: int) -> tuple[Span, ...]:
        """Its part of the request's timeline; its tokens need `num_blocks`."""
        sequence, stats = self.sequence, self.sequence.stats
        return stats.spans(
            place,
            {
                Phase.DECODE: {"steps": stats.num_steps, "preemptions": stats.num_preemptions},
                Phase.LOCAL_PREFILL: {
                    "tokens": len(sequence.submit.prompt_ids),
                    "chunks": stats.num_chunks,
                },
                Phase.CREDIT_WAIT: {
                    "blocks": num_blocks,
                    "cached_tokens": stats.num_cached_tokens,
                },
            },
        )

    @property
    def gap_s(self) -> float:
        """The longest gap that its client was promised; infinity without a promise."""
        promised = self.sequence.submit.gap_s
        return math.inf if promised is None else promised

    @property
    def catches_up(self) -> bool:
        """Whether it came here while it ran, and its client waits for the next token."""
        return self.sequence.submit.live and not self.sequence.stats.num_preemptions
