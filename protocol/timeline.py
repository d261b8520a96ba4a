"""What happened to a request and when: spans collected along its path."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The phases a request can spend time in, in the order of its life."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"  # in the router: not its turn yet
    ROUTE = "route"
    CREDIT_WAIT = "credit_wait"  # decode had no room yet
    PREFILL_QUEUE = "prefill_queue"  # granted, waiting for a prefill step
    PREFILL = "prefill"  # first chunk started .. token 1 sampled
    TRANSFER = "transfer"  # first piece announced .. commit acknowledged
    DECODE_QUEUE = "decode_queue"  # committed, waiting for a decode step
    DECODE = "decode"  # first decode step started .. last token
    LOCAL_PREFILL = "local_prefill"  # prompt (re)computed on the decode worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase: wall-clock start and end in seconds since the Unix epoch, the place, and counts.

    Keys used in `counts`: bytes, blocks, tokens, cached_tokens, steps, chunks, preemptions.
    """

    phase: Phase
    start: float
    end: float
    place: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSpan:
    """A span of one choice and attempt of a request."""

    span: Span
    choice: int
    attempt: int
