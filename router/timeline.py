"""A request's timeline, as both doors show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.relay import PlacedSpan


def timeline_json(
    *,
    request_id: str,
    arrival: float,
    first_token: float,
    end: float,
    spans: Iterable[PlacedSpan],
) -> dict[str, Any]:
    """Where the time of one request went, its spans in the order they began.

    Times are seconds since the Unix epoch; `first_token` is 0 when there was none. The gRPC message
    has the same names.
    """
    ordered = sorted(spans, key=lambda placed: (placed.span.start, placed.span.end))
    return {
        "request_id": request_id,
        "arrival": arrival,
        "first_token": first_token,
        "end": end,
        "spans": [_span_json(placed) for placed in ordered],
    }


def _span_json(placed: PlacedSpan) -> dict[str, Any]:
    span = placed.span
    return {
        "phase": span.phase.value,
        "start": span.start,
        "end": span.end,
        "place": span.place,
        "counts": span.counts,
        "note": span.note,
        "choice": placed.choice,
        "attempt": placed.attempt,
    }
