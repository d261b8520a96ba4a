"""A request in the trace that it belongs to: what workers are told, and its spans at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from observability.logging import get_logger
from protocol.errors import BatonError, ErrorCode
from protocol.trace import TraceContext
from router.dispatch.request_run import RequestRun
from router.request.generate_request import GenerateRequest
from router.request.request_id import RequestId

if TYPE_CHECKING:  # its packages are optional
    from observability.tracing import Tracing

log = get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(slots=True)
class RequestTrace:
    """Set `generation` once there is one. `context` goes on to the workers: the request's own span
    if this router makes spans, else the client's."""

    context: TraceContext | None
    generation: RequestRun | None = None


@contextmanager
def traced(
    tracing: Tracing | None,
    request: GenerateRequest,
    *,
    called: RequestId,
    arrival: float,
    incoming: TraceContext | None,
    model: str,
    clock: Callable[[], float],
) -> Iterator[RequestTrace]:
    """The trace of a request that runs in the block; its spans are made at the end."""
    if tracing is None:
        yield RequestTrace(incoming)
        return
    span = tracing.begin(f"{request.kind} {model}", incoming, start=arrival)
    trace, code = RequestTrace(span.context), None
    try:
        yield trace
    except BaseException as error:
        code = _code(error)
        raise
    finally:
        named = {"gen_ai.request.model": model, "baton.request_name": called.name}
        attributes = named | _described(trace.generation)
        if trace.generation is not None and span.recording:
            for placed in trace.generation.spans:
                place = {"baton.choice": placed.choice, "baton.attempt": placed.attempt}
                span.phase(placed.span, place)
        span.end(attributes, error=code, end=clock())


def _described(generation: RequestRun | None) -> dict[str, str | int | float]:
    if generation is None:
        return {}
    usage, first = generation.usage, generation.first_token
    return {
        "gen_ai.response.id": generation.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        **({"baton.time_to_first_token": first - generation.arrival} if first else {}),
    }


def make_tracing(endpoint: str, router_id: str) -> Tracing | None:
    """Tracing as configured here or by OTEL_* variables; None when it is not.

    Raises ValueError when it is configured here and its packages are missing.
    """
    if not endpoint and not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from observability.tracing import exporting

        return exporting(endpoint, router_id)
    except ImportError as error:
        missing = f"otlp_endpoint needs the packages of the extra `tracing`: {error}"
        if endpoint:
            raise ValueError(missing) from None
        log.warning(missing)
        return None


def _code(error: BaseException) -> ErrorCode:
    if isinstance(error, BatonError):
        return error.code
    return ErrorCode.INTERNAL if isinstance(error, Exception) else ErrorCode.CANCELLED
