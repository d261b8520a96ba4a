"""A request's timeline: its spans in order, as values for either door."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from router.relay import PlacedSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of one request went.

    Times are seconds since the Unix epoch; `first_token` is 0 when there was none.
    """

    request_id: str
    arrival: float
    first_token: float
    end: float
    spans: tuple[PlacedSpan, ...]

    def to_json(self) -> dict[str, Any]:
        """The timeline as a JSON object; the gRPC message has the same names."""
        return {
            "request_id": self.request_id,
            "arrival": self.arrival,
            "first_token": self.first_token,
            "end": self.end,
            "spans": [_span_json(placed) for placed in self.spans],
        }


def make_timeline(
    *,
    request_id: str,
    arrival: float,
    first_token: float,
    end: float,
    spans: Iterable[PlacedSpan],
) -> Timeline:
    """A timeline with its spans in the order they began."""
    ordered = sorted(spans, key=lambda placed: (placed.span.start, placed.span.end))
    return Timeline(
        request_id=request_id,
        arrival=arrival,
        first_token=first_token,
        end=end,
        spans=tuple(ordered),
    )


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
