"""Life of a request on a prefill worker: states, commands that change them, and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kv_transfer.control.listeners import TransferReport
from protocol.ids import RequestKey
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded, StepOutput
from worker_runtime.scheduling.scheduler import SchedulerEntry


class PrefillState(StrEnum):
    """Where a sequence is on this worker."""

    EXPECTING = "expecting"
    GRANTED = "granted"
    RUNNING = "running"
    SENDING = "sending"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class PrefillEntry(SchedulerEntry):
    """`pushed` counts blocks handed to the sender, `num_found` tokens of one that has not started
    were in the cache when it came."""

    state: PrefillState
    num_found: int = 0
    pushed: int = 0
    granted_at: float = 0.0
    progress_at: float = 0.0  # of the grant, or of the last chunk
    num_bytes: int = 0
    num_pieces: int = 0

    @property
    def ending(self) -> bool:
        """Whether it waits until no read of its blocks is in flight."""
        return self.state is PrefillState.ENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Decode holds room for the request; the KV of its first `num_cached_tokens` is there."""

    key: RequestKey
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Decode has everything and owns the sequence."""

    key: RequestKey
    report: TransferReport


Command = Granted | Delivered | HandoffEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """These blocks, number first_block .. of the sequence, are complete once the engine's step
    `after` is over (0: they are): send them."""

    key: RequestKey
    block_ids: tuple[int, ...]
    first_block: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHandoff:
    """Everything was pushed and token 1 is known."""

    key: RequestKey
    first_token: int


@dataclass(slots=True)
class PrefillOutput(StepOutput):
    """What one turn of the step thread wants done on the event loop, in this order."""

    handoffs: list[Push | CommitHandoff | EndHandoff] = field(default_factory=list)
