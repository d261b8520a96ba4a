"""What happened to a request and when: spans collected along its path."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from protocol.message import Message


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


class Span(Message):
    """One phase: wall-clock start and end in seconds since the Unix epoch, the place, and counts.

    Keys used in `counts`: bytes, blocks, tokens, cached_tokens, steps, chunks, preemptions.
    """

    phase: Phase
    place: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""
    start: float
    end: float


class PlacedSpan(Message):
    """A span of one choice and attempt of a request."""

    span: Span
    choice: int
    attempt: int
