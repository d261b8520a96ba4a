"""What the step thread of a prefill worker is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.control.listeners import TransferReport
from protocol.ids import RequestKey
from worker_runtime.scheduling import scheduler
from worker_runtime.scheduling.commands import EndHandoff, HandoffEnded


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
class PrefillOutput(scheduler.StepOutput):
    """What one turn of the step thread wants done on the event loop, in this order."""

    handoffs: list[Push | CommitHandoff | EndHandoff] = field(default_factory=list)
