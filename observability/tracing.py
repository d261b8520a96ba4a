"""OpenTelemetry spans of requests, made from their timelines after they end.

While a request runs only the id of its span exists, which workers receive. The packages are
optional (the extra `tracing`); the usual OTEL_* variables set sampling, limits and headers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation import set_span_in_context

from protocol.errors import ErrorCode
from protocol.timeline import Span, TraceContext

_TRACES_PATH = "/v1/traces"

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton")

    def begin(self, name: str, parent: TraceContext | None, *, start: float) -> RequestSpan:
        """The span of a request that arrived at `start`, in seconds since the Unix epoch."""
        span = self._tracer.start_span(
            name,
            context=None if parent is None else set_span_in_context(_remote(parent)),
            kind=otel.SpanKind.SERVER,
            start_time=_ns(start),
        )
        return RequestSpan(self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans; may take seconds."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request; `context` is its place in the trace, for workers."""

    def __init__(self, tracer: otel.Tracer, span: otel.Span) -> None:
        self._tracer = tracer
        self._span = span
        own = span.get_span_context()
        self.context = TraceContext(
            trace_id=otel.format_trace_id(own.trace_id),
            span_id=otel.format_span_id(own.span_id),
            sampled=own.trace_flags.sampled,
            state=own.trace_state.to_header(),
        )

    def phase(self, span: Span, attributes: Attributes) -> None:
        child = self._tracer.start_span(
            span.phase.value,
            context=set_span_in_context(self._span),
            start_time=_ns(span.start),
            attributes={
                "baton.place": span.place,
                **{f"baton.{key}": value for key, value in span.counts.items()},
                **({"baton.note": span.note} if span.note else {}),
                **attributes,
            },
        )
        child.end(_ns(max(span.start, span.end)))

    @property
    def recording(self) -> bool:
        """Whether the span is exported; otherwise phases can be left out."""
        return self._span.is_recording()

    def end(self, attributes: Attributes, *, error: ErrorCode | None, end: float) -> None:
        """End the span. Only the code of an error is exported: messages may quote a prompt."""
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error.value)
            self._span.set_status(otel.StatusCode.ERROR, error.value)
        self._span.end(_ns(end))


def otlp_tracing(endpoint: str, instance: str) -> Tracing:
    """Tracing that exports over OTLP/HTTP to `endpoint`; if empty, to that of the OTEL_* variables.
    Raises ImportError without the exporter's package."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _TRACES_PATH
    name = os.environ.get("OTEL_SERVICE_NAME", "baton-router")
    resource = Resource.create({"service.name": name, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    return Tracing(provider)


def _remote(parent: TraceContext) -> otel.Span:
    flags = otel.TraceFlags.SAMPLED if parent.sampled else otel.TraceFlags.DEFAULT
    return otel.NonRecordingSpan(
        otel.SpanContext(
            trace_id=int(parent.trace_id, 16),
            span_id=int(parent.span_id, 16),
            is_remote=True,
            trace_flags=otel.TraceFlags(flags),
            trace_state=otel.TraceState.from_header([parent.state] if parent.state else []),
        )
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
