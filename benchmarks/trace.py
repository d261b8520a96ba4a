"""Shares of time in a profiler's trace of an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as trace_kernels

from benchmarks.gpu_limits import Report
from benchmarks.ranks import Ranks


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


def profile(
    report: Report, ranks: Ranks, name: str, run: Callable[[int], object], steps: int = 12
) -> None:
    """Time per kernel of one of the steps that `run(number of them)` takes, and how long the device
    idles between them."""
    ranks.meet(f"profile/{name}")
    run(4)
    if report.rank:
        ranks.meet(f"profiler/{name}")
        run(steps)
        return
    with trace_kernels(activities=[ProfilerActivity.CUDA]) as trace:
        ranks.meet(f"profiler/{name}")  # it takes longer to start than ranks wait for each other
        run(steps)
        torch.cuda.synchronize()
    report_trace(report, name, trace.events())
