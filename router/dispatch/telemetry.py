"""What a request adds to the metrics and to the trace that it belongs to; promises that it kept."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from observability import metrics
from observability.export import MetricSet
from observability.logging import get_logger
from protocol.errors import BatonError, ErrorCode, InvalidRequest
from protocol.states import FinishReason
from protocol.timeline import Phase, TraceContext
from router.dispatch.request_run import RequestRun
from router.request.generate_request import GenerateRequest, RequestId

if TYPE_CHECKING:  # its packages are optional
    from observability.tracing import Tracing

log = get_logger(__name__)
#: One line for each request, whatever the level of other logs (`router.settings.access_log`).
access_log = get_logger("access")
access_log.setLevel("INFO")

_QUEUES = (Phase.QUEUE, Phase.CREDIT_WAIT, Phase.PREFILL_QUEUE)
_PREFILLS = (Phase.PREFILL, Phase.LOCAL_PREFILL)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def record_success(
    metric_set: MetricSet, run: RequestRun, *, end: float
) -> tuple[int, float] | None:
    """Record a finished request. It ends with its last token, however slowly the client reads, or,
    without tokens, at `end` (seconds since the Unix epoch).

    Returns the number of tokens after the first and the seconds that they took, if there are any.
    """
    end = run.last_token or end
    reason = run.finishes[0] or FinishReason.STOP
    metric_set.count(metrics.REQUEST_SUCCESS, finished_reason=reason.value)
    usage = run.usage
    metric_set.observe(metrics.REQUEST_PROMPT_TOKENS, usage.prompt_tokens)
    metric_set.observe(metrics.REQUEST_GENERATION_TOKENS, usage.completion_tokens)
    pace: tuple[int, float] | None = None
    total_s = max(0.0, end - run.arrival)
    metric_set.observe(metrics.E2E_LATENCY, total_s)
    if usage.completion_tokens > 1 and len(run.finishes) == 1:
        pace = usage.completion_tokens - 1, max(0.0, end - run.first_token)
        metric_set.observe(metrics.TIME_PER_OUTPUT_TOKEN, pace[1] / pace[0])
    _measure_phases(metric_set, run)
    return pace


def _measure_phases(metric_set: MetricSet, run: RequestRun) -> None:
    seconds = dict.fromkeys(Phase, 0.0)
    for placed in run.spans:
        span = placed.span
        length_s = max(0.0, span.end - span.start)
        seconds[span.phase] += length_s
        metric_set.observe(metrics.PHASE_TIME, length_s, phase=span.phase.value)
        if span.phase is Phase.TRANSFER:
            metric_set.observe(metrics.HANDOFF_TIME, length_s)
            metric_set.observe(metrics.HANDOFF_SIZE, span.counts.get("bytes", 0))
    waits = [(p.span.start, p.span.end) for p in run.spans if p.span.phase in _QUEUES]
    metric_set.observe(metrics.QUEUE_TIME, _covered(waits))
    metric_set.observe(metrics.PREFILL_TIME, sum(seconds[phase] for phase in _PREFILLS))
    metric_set.observe(metrics.DECODE_TIME, seconds[Phase.DECODE])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one span: those of two workers that wait for the same grant overlap."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(slots=True)
class RequestTrace:
    """`run` is set once there is one. `context` goes to the workers: the request's own span if this
    router makes spans, else the client's."""

    context: TraceContext | None
    run: RequestRun | None = None


@contextmanager
def traced(
    tracing: Tracing | None,
    request: GenerateRequest,
    *,
    request_id: RequestId,
    arrival: float,
    incoming: TraceContext | None,
    model: str,
    clock: Callable[[], float],
) -> Iterator[RequestTrace]:
    """Trace a request that runs in the block; its spans are made at the end."""
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
        named = {"gen_ai.request.model": model, "baton.request_name": request_id.name}
        attributes = named | _described(trace.run)
        if trace.run is not None and span.recording:
            for placed in trace.run.spans:
                place = {"baton.choice": placed.choice, "baton.attempt": placed.attempt}
                span.phase(placed.span, place)
        span.end(attributes, error=code, end=clock())


@contextmanager
def access_logged(
    request: GenerateRequest,
    request_id: RequestId,
    key: str,
    clock: Callable[[], float],
    trace: RequestTrace,
    enabled: bool,
) -> Iterator[None]:
    """Log the request that runs in the block in one line at its end, if `enabled`. `key`: the name
    of the caller's key."""
    if not enabled:
        yield
        return
    start, code = clock(), "ok"
    try:
        yield
    except BaseException as error:
        code = _code(error).value
        raise
    finally:
        run = trace.run
        seconds = clock() - (start if run is None else run.arrival)
        named = {"request": request_id.key, "request_name": request_id.name, "key": key}
        ended = {"kind": request.kind.value, "code": code, "seconds": round(seconds, 4)}
        used = {} if run is None else _used(run)
        access_log.info("request", extra={**named, **ended, **used})


def _used(run: RequestRun) -> dict[str, float]:
    usage = run.usage
    counts: dict[str, float] = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if not run.first_token:
        return counts
    return counts | {"first_token_s": round(run.first_token - run.arrival, 4)}


def _described(run: RequestRun | None) -> dict[str, str | int | float]:
    if run is None:
        return {}
    usage, first = run.usage, run.first_token
    return {
        "gen_ai.response.id": run.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        **({"baton.time_to_first_token": first - run.arrival} if first else {}),
    }


def has_tracing() -> bool:
    """Whether the packages of the extra `tracing` are installed."""
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None


def make_tracing(endpoint: str, router_id: str) -> Tracing | None:
    """Tracing as configured here or by OTEL_* variables; None when it is not.

    Raises ValueError when it is configured here and its packages are missing.
    """
    if not endpoint and not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from observability.tracing import otlp_tracing

        return otlp_tracing(endpoint, router_id)
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


def record_promises(metric_set: MetricSet, run: RequestRun, promises: Mapping[str, float]) -> None:
    """Count whether a request that finished kept each promise of its tier; one that failed on a
    worker or by its deadline kept none. Refused, invalid and cancelled requests do not count."""
    if not promises or isinstance(run.error, InvalidRequest):
        return
    if run.error is not None:
        kept = dict.fromkeys(promises, False)
    elif None in run.finishes:
        return
    else:
        seconds = latencies(run)
        kept = {name: seconds[name] <= promised for name, promised in promises.items()}
    kept["all"] = all(kept.values())
    for name, success in kept.items():
        outcome = "kept" if success else "missed"
        metric_set.count(metrics.TIER_PROMISES, tier=run.tier_name, promise=name, outcome=outcome)


def latencies(run: RequestRun) -> dict[str, float]:
    """Seconds to the first token, a token after it and of the longest gap: each of the choice where
    it is longest. Only once the request has finished; 0 without tokens."""
    choices = [choice for choice in run.choices if choice.first_token]
    paces = [(c.last_token - c.first_token) / max(1, c.stream.tokens - 1) for c in choices]
    return {
        "ttft": max((c.first_token - run.arrival for c in choices), default=0.0),
        "tpot": max(paces, default=0.0),
        "gap": max((c.longest_gap for c in choices), default=0.0),
    }
