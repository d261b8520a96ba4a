"""Reading a call's metadata."""

from __future__ import annotations

from typing import Any

from grpc import aio

from protocol.timeline import TraceContext, parse_trace


def metadata_value(context: aio.ServicerContext[Any, Any], name: str) -> str | None:
    """The first value of this (lower-case) key."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def trace_of(context: aio.ServicerContext[Any, Any]) -> TraceContext | None:
    """Where the client says a call stands in its trace."""
    return parse_trace(
        metadata_value(context, "traceparent"), metadata_value(context, "tracestate")
    )
