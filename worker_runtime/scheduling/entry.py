"""Life cycle of a request on a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from protocol.loads import QueuedPrompt
from worker_runtime.scheduling.prompt_order import AIMS_S, WaitingPrompt
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


Transitions = Mapping[RequestState, frozenset[RequestState]]


@dataclass(slots=True)
class SchedulerEntry(ABC):
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

    def waiting_prompt(
        self, tokens_per_second: float, now: float, *, starved: bool, num_cached: int = 0
    ) -> WaitingPrompt:
        """It as one of the prompts that wait. `num_cached`: tokens that will not be computed,
        besides those that were found in the cache."""
        sequence, first_s = self.sequence, self.sequence.submit.first_s
        waited_s = now - sequence.arrival
        return WaitingPrompt(
            work_s=(len(sequence.tokens) - sequence.num_launched - num_cached) / tokens_per_second,
            waited_s=waited_s,
            promised_s=None if first_s is None else first_s - waited_s,
            starved=starved,
        )

    def queued_prompt(self, left: int, ends_at: float) -> QueuedPrompt:
        """It as routers see it."""
        submit = self.sequence.submit
        within_s = AIMS_S[0] if submit.first_s is None else submit.first_s
        return QueuedPrompt(
            key=submit.key,
            left_tokens=left,
            due_at=self.sequence.arrival + within_s,
            ends_at=ends_at,
            begun=not self.untouched,
        )

    def move(self, target: RequestState) -> None:
        """Enter a state that the table allows next."""
        assert target in self.transitions[self.state], f"{self.state} -> {target}"
        self.state = target

    @property
    def router_id(self) -> str:
        return self.sequence.submit.router_id

    @property
    @abstractmethod
    def untouched(self) -> bool:
        """Whether its prompt is computed here, and nothing of it has been computed or brought."""

    @property
    def ending(self) -> bool:
        """Whether only its hand-off still accesses blocks."""
        return self.state is RequestState.ENDING
