"""Parts of what workers and routers report of their load."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.ids import RequestKey
from protocol.message import Message


class QueuedPrompt(Message):
    """A prompt of which a worker has `left_tokens` to compute. Its first token is expected at
    `ends_at` and wanted by `due_at`, on the worker's clock. `begun`: it cannot be given back."""

    key: RequestKey
    left_tokens: int
    due_at: float
    ends_at: float
    begun: bool


def waiting(prompts: Sequence[QueuedPrompt]) -> list[tuple[RequestKey, bool]]:
    """Which prompts wait, and whether they have begun."""
    return [(prompt.key, prompt.begun) for prompt in prompts]


class RouterLoad(Message):
    """What waits in a router and what came to it, for the sizes of the pools."""

    waiting_tokens: int = 0  # uncached prompt tokens that wait for prefill
    blocked_tokens: int = 0  # tokens of prompts that wait for blocks of decode
    arrived_tokens: int = 0  # uncached tokens of all prompts so far, refused ones included
    refused_for_pace: int = 0  # requests refused so far because decode is too slow for their tier


class TierLoad(Message):
    """A KV tier below the pool, over all ranks. `used_bytes` of a disk are those that this worker
    can read; `bytes_per_second`: of its last loads, 0 before the first."""

    tier: str
    used_bytes: int
    total_bytes: int
    bytes_per_second: float
