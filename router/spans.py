"""A request in the trace that it belongs to: what workers are told, and its spans at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from observability.logging import get_logger
from protocol.errors import BatonError, ErrorCode
from protocol.trace import TraceContext
from router.generation import Generation
from router.request import GenerateRequest

if TYPE_CHECKING:  # its packages are optional
    from observability.tracing import RequestSpan, Tracing

log = get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class RequestTrace:
    """Set `generation` once there is one. `context` goes on to the workers: the request's own span
    if this router makes spans, else the client's."""

    def __init__(self, span: RequestSpan | None, incoming: TraceContext | None) -> None:
        self.context = incoming if span is None else span.context
        self.generation: Generation | None = None
        self._span = span

    def end(self, error: BaseException | None, *, model: str, end: float) -> None:
        """Make the spans."""
        span, generation = self._span, self.generation
        if span is None:
            return
        attributes: dict[str, str | int | float | bool] = {"gen_ai.request.model": model}
        if generation is not None:
            usage = generation.usage
            attributes["gen_ai.response.id"] = generation.request_id
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
            if generation.first_token:
                first_s = generation.first_token - generation.arrival
                attributes["baton.time_to_first_token"] = first_s
            if span.recording:
                for placed in generation.spans:
                    place = {"baton.choice": placed.choice, "baton.attempt": placed.attempt}
                    span.phase(placed.span, place)
        span.end(attributes, error=None if error is None else _code(error), end=end)


@contextmanager
def traced(
    tracing: Tracing | None,
    request: GenerateRequest,
    *,
    arrival: float,
    incoming: TraceContext | None,
    model: str,
    clock: Callable[[], float],
) -> Iterator[RequestTrace]:
    """The trace of a request that runs in the block."""
    span = None
    if tracing is not None:
        span = tracing.begin(f"{request.kind} {model}", incoming, start=arrival)
    trace = RequestTrace(span, incoming)
    error: BaseException | None = None
    try:
        yield trace
    except BaseException as caught:
        error = caught
        raise
    finally:
        trace.end(error, model=model, end=clock())


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
        missing = f"otlp_endpoint needs `pip install baton[tracing]`: {error}"
        if endpoint:
            raise ValueError(missing) from None
        log.warning(missing)
        return None


def _code(error: BaseException) -> ErrorCode:
    if isinstance(error, BatonError):
        return error.code
    return ErrorCode.INTERNAL if isinstance(error, Exception) else ErrorCode.CANCELLED
