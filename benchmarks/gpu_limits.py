"""Limits of a GPU, measured, with which the engine's figures are compared; shares of its time."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as trace_kernels

from benchmarks.ranks import Ranks
from cluster.bench.facts import commit
from engine.cuda.group import DeviceGroup, ReduceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this card, measured in this run.

    copy: bytes/s read plus written; matrix: FLOP/s of a bf16 product.
    """

    copy: float
    matrix: float


@dataclass(slots=True, kw_only=True)
class Report:
    """All figures of a run."""

    card: str
    torch: str
    commit: str
    command: str
    rank: int
    limits: Limits
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, **figures: Any) -> None:
        """Record and print one figure."""
        if self.rank:
            return
        self.rows.append({"what": what, **figures})
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"{what}: {'  '.join(cells)}", flush=True)

    def write(self, path: Path | None) -> None:
        """Write all figures to `path`, if set and on rank 0."""
        if path is not None and not self.rank:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def begin_report(
    module: str,
    argv: Sequence[str],
    args: argparse.Namespace,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    limits: Limits | None = None,
) -> Report:
    """Measure this card's limits, unless they are known."""
    limits = limits or Limits(copy=_copy_rate(device), matrix=_matrix_rate(device))
    torch.cuda.empty_cache()
    report = Report(
        card=f"{ranks} x {torch.cuda.get_device_name(device)}",
        torch=f"{torch.__version__}, python {platform.python_version()}",
        commit=args.commit or commit(),
        command=" ".join((f"python -m benchmarks.{module}", *argv)),
        rank=rank,
        limits=limits,
    )
    report.add("limits", copy_tb_s=limits.copy / 1e12, matrix_tflops=limits.matrix / 1e12)
    return report


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run` on the current stream, by device events."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return float(median(times))


def _copy_rate(device: torch.device) -> float:
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2.0 * float(source.nbytes) / timed(lambda: target.copy_(source), 10)


def _matrix_rate(device: torch.device) -> float:
    """Of an 8192^3 product of random data."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b.t())
    return 2 * 8192**3 / timed(lambda: torch.mm(a, b.t()), 10)


def measure_all_reduce(group: DeviceGroup, device: torch.device, report: Report) -> None:
    """Microseconds of each all-reduce inside a CUDA graph, by size."""
    stream = torch.cuda.Stream(device)
    for kib in (8, 16, 64, 256, 512, 1024, 2048, 4096):
        h = torch.ones(kib * 512, dtype=torch.bfloat16, device=device)
        figures = {}
        for kind in ReduceKind:
            partial = group.partial_for(kind, h)
            partial.fill_(1.0)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                group.reduce_by(kind, partial, h)
                group.end_step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(20):
                    group.reduce_by(kind, partial, h)
                group.end_step()
            graph.replay()
            figures[f"{kind}_us"] = timed(graph.replay, 9) / 20 * 1e6
        report.add(f"all-reduce {kib} KiB", **figures)


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
