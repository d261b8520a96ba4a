"""Whether requests kept what their service tiers promise, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from observability import metrics
from observability.export import MetricSet
from protocol.errors import InvalidRequest
from router.dispatch.request_run import RequestRun


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
