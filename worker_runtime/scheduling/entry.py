"""Life cycle of a request on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from worker_runtime.scheduling.sequence import Sequence


class RequestState(StrEnum):
    """States of a request; each kind of worker has a table of the transitions it allows."""

    AWAITING_GRANT = "awaiting_grant"  # decode has not set blocks aside yet
    GRANTED = "granted"  # prefill: decode holds blocks, no block is held here
    RECEIVING = "receiving"  # decode: holds blocks, the hand-off writes to them
    WAITING = "waiting"  # decode: computes the prompt itself once there are blocks
    RUNNING = "running"  # its tokens run in steps
    SENDING = "sending"  # its next tokens are known, the receiver has not confirmed the KV
    ENDING = "ending"  # the outcome was reported, the hand-off may still access blocks
    GONE = "gone"  # forgotten; steps in flight may still write to its blocks


#: Seconds of work that a second to spare before the promised first token counts as, so many at most
#: and without a promise, and that being late counts as.
_SPARE_SHARE = 0.3
_MAX_SPARE_S = 2.0
_LATE_S = 0.2

Transitions = Mapping[RequestState, frozenset[RequestState]]


@dataclass(slots=True)
class SchedulerEntry:
    """A request on a worker. `order` is its seniority: the first to arrive is served first.

    without_blocks: states that refer to no KV block, but for those that steps in flight write to.
    keeps_window: KV behind the windows of its KV groups is kept, as a receiver may need it.
    """

    transitions: ClassVar[Transitions]
    without_blocks: ClassVar[frozenset[RequestState]]

    sequence: Sequence
    order: int
    state: RequestState
    keeps_window: bool = field(default=False, kw_only=True)

    def prompt_rank(
        self, tokens_per_second: float, now: float, credit_s: float, num_cached: int = 0
    ) -> float:
        """Order of prompts, the smallest work first, so that most get their first token soon where
        not all can. `credit_s`: seconds of work that its waiting makes up for, so that none
        starves. `num_cached`: tokens that will not be computed, besides those that were found in
        the cache.

        Seconds to spare before the promised first token count as some work, and so does being late:
        a promise that cannot be kept any more makes place for those that can."""
        sequence = self.sequence
        work = len(sequence.tokens) - sequence.stats.num_cached_tokens - num_cached
        work_s = work / tokens_per_second
        spare_s = _MAX_SPARE_S
        if sequence.submit.first_s is not None:
            left_s = sequence.submit.first_s - (now - sequence.arrival)
            spare_s = min(spare_s, left_s - work_s)
        return work_s - credit_s + (_SPARE_SHARE * spare_s if spare_s >= 0.0 else _LATE_S)

    def move(self, target: RequestState) -> None:
        """Enter a state that the table allows next."""
        assert target in self.transitions[self.state], f"{self.state} -> {target}"
        self.state = target

    @property
    def router_id(self) -> str:
        return self.sequence.submit.router_id

    @property
    def may_hold_blocks(self) -> bool:
        """Whether its tables may refer to held blocks with no step in flight."""
        return self.state not in self.without_blocks

    @property
    def ending(self) -> bool:
        """Whether only its hand-off still accesses blocks."""
        return self.state is RequestState.ENDING
