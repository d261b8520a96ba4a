"""What a finished request adds to the metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable

from observability import metrics
from observability.export import MetricSet
from protocol.states import FinishReason
from protocol.timeline import Phase
from router.dispatch.request_run import RequestRun

_QUEUES = (Phase.QUEUE, Phase.CREDIT_WAIT, Phase.PREFILL_QUEUE)
_PREFILLS = (Phase.PREFILL, Phase.LOCAL_PREFILL)


def succeeded(
    metric_set: MetricSet, generation: RequestRun, *, end: float
) -> tuple[int, float] | None:
    """Record a request that ended well, at `end` seconds since the Unix epoch: with its last token,
    if it has any, however slowly the client reads.

    Returns its tokens after the first and the seconds that they took, if it says.
    """
    end = generation.last_token or end
    reason = generation.finishes[0] or FinishReason.STOP
    metric_set.count(metrics.REQUEST_SUCCESS, finished_reason=reason.value)
    usage = generation.usage
    metric_set.observe(metrics.REQUEST_PROMPT_TOKENS, usage.prompt_tokens)
    metric_set.observe(metrics.REQUEST_GENERATION_TOKENS, usage.completion_tokens)
    pace: tuple[int, float] | None = None
    total_s = max(0.0, end - generation.arrival)
    metric_set.observe(metrics.E2E_LATENCY, total_s)
    if usage.completion_tokens > 1 and len(generation.finishes) == 1:
        pace = usage.completion_tokens - 1, max(0.0, end - generation.first_token)
        metric_set.observe(metrics.TIME_PER_OUTPUT_TOKEN, pace[1] / pace[0])
    _measure_phases(metric_set, generation)
    return pace


def _measure_phases(metric_set: MetricSet, generation: RequestRun) -> None:
    seconds = dict.fromkeys(Phase, 0.0)
    for placed in generation.spans:
        span = placed.span
        length_s = max(0.0, span.end - span.start)
        seconds[span.phase] += length_s
        metric_set.observe(metrics.PHASE_TIME, length_s, phase=span.phase.value)
        if span.phase is Phase.TRANSFER:
            metric_set.observe(metrics.HANDOFF_TIME, length_s)
            metric_set.observe(metrics.HANDOFF_SIZE, span.counts.get("bytes", 0))
    waits = [(p.span.start, p.span.end) for p in generation.spans if p.span.phase in _QUEUES]
    metric_set.observe(metrics.QUEUE_TIME, _covered(waits))
    metric_set.observe(metrics.PREFILL_TIME, sum(seconds[phase] for phase in _PREFILLS))
    metric_set.observe(metrics.DECODE_TIME, seconds[Phase.DECODE])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one span: both workers of a pair wait for the same grant."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
