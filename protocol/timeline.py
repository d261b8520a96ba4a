"""What happened to a request and when: spans of its phases, and its place in a distributed trace
(W3C Trace Context, https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import field

from protocol.message import Message

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512


class Phase(StrEnum):
    """Phases of a request, in order."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"  # in the router's admission queue
    ROUTE = "route"
    CREDIT_WAIT = "credit_wait"  # decode has no free blocks yet
    PREFILL_QUEUE = "prefill_queue"  # granted, waiting for a prefill step
    KV_LOAD = "kv_load"  # KV of the prompt comes from host memory, files, a worker
    PREFILL = "prefill"  # first chunk started .. token 1 sampled
    TRANSFER = "transfer"  # first piece announced .. commit acknowledged
    DECODE_QUEUE = "decode_queue"  # committed, waiting for a decode step
    DECODE = "decode"  # first decode step started .. last token
    LOCAL_PREFILL = "local_prefill"  # prompt (re)computed on the decode worker


class Span(Message):
    """One phase: wall-clock start and end in seconds since the Unix epoch, the place, and counts.

    Keys used in `counts`: bytes, blocks, tokens, cached_tokens, host_tokens, disk_tokens,
    peer_tokens, steps, chunks, preemptions.
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


class TraceContext(Message):
    """One span of a trace, the parent of others. Ids in lower-case hexadecimal; `state` belongs to
    other systems and is passed on unchanged."""

    trace_id: str
    sampled: bool = False
    state: str = ""
    span_id: str

    @property
    def parent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse_trace(parent: str | None, state: str | None) -> TraceContext | None:
    """The context in the headers `traceparent` and `tracestate`; None without a valid parent, as
    the standard demands."""
    match = _PARENT.fullmatch((parent or "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    wrong = version == "ff" or (version == "00" and rest)
    if wrong or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = state or ""
    fits = len(state) <= _MAX_STATE and state.isascii() and state.isprintable()
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        sampled=bool(int(flags, 16) & 1),
        state=state if fits else "",
    )
