"""Shares of time in a profiler's trace of an engine's steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu_limits import Report


def report_trace(report: Report, name: str, events: Iterable[Any], num_kernels: int = 14) -> None:
    """Idle shares of the middle of a trace of decode steps, and its most expensive kernels."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if str(event.device_type).endswith("CUDA")
    )
    spans = spans[len(spans) // 3 : -len(spans) // 6 or None]
    busy, reach, between = 0.0, spans[0][0], 0.0
    totals: dict[str, list[float]] = {}
    for start, end, kernel in spans:
        busy += max(0.0, end - max(start, reach))
        if "embed" in kernel or "Memcpy" in kernel:
            between += max(0.0, start - reach)
        reach = max(reach, end)
        entry = totals.setdefault(kernel[:70], [0.0, 0])
        entry[0] += end - start
        entry[1] += 1
    whole = reach - spans[0][0]
    report.add(
        f"idle {name}",
        between_steps=between / whole,
        between_kernels=1.0 - (busy + between) / whole,
        span_us=whole,
    )
    table = sorted(totals.items(), key=lambda item: -item[1][0])[:num_kernels]
    for kernel, (spent, count) in table:
        report.add(f"  {kernel}", share=spent / whole, mean_us=spent / count, calls=int(count))
