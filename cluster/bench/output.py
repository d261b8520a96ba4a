"""Measure, and show it: a table for the terminal, JSON, a page and a picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.bench.facts import config_hash, facts, output_of, say, times
from cluster.bench.measure import Result, Summary
from cluster.bench.page import distribution, page
from cluster.bench.runs import Measured, measure_now

#: Lag of the generator (p99) beyond which its figures are not to be trusted.
_MAX_LAG_MS = 5.0
_HEAD = (
    *("run", "requests (failed)", "output tok/s", "TTFT ms", "TPOT ms", "ITL ms"),
    *("longest gap ms", "E2E ms"),
)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure `options.url`, print, write; 1 when a request failed. `arguments` is the command line
    to write down. Raises Unavailable when the server cannot be reached."""
    measured = measure_now(options)
    publish(options, measured, command=f"baton {public(arguments)}")
    return int(any(summary.failures for one in measured for summary in one.run.repeats))


def rows(measured: Sequence[Measured], gpus: int) -> list[list[str]]:
    """The head and one line for each run: the last repeat, latencies as p50 / p90 / p99."""
    promised = list(measured[0].run.repeats[-1].kept)
    goodput = [*(f"keep {name}" for name in promised), *(["goodput/s"] if promised else ())]
    per_gpu = ["goodput/s/GPU"] if promised and gpus else []
    lines = [[*_HEAD, *goodput, *per_gpu, "generator lag p99 ms"]]
    for one in measured:
        last = one.run.repeats[-1]
        good = last.goodput_per_s or 0.0
        lines.append(
            [
                one.run.label,
                f"{last.requests} ({last.failures})",
                f"{last.output_tokens_per_s:.1f}",
                *(times(each) for each in _latencies(last)),
                *(f"{share:.1%}" for share in last.kept.values()),
                *([f"{good:.2f}"] if promised else ()),
                *([f"{good / gpus:.2f}"] if per_gpu else ()),
                f"{one.lag_ms['p99']:.2f}",
            ]
        )
    return lines


def _latencies(summary: Summary) -> tuple[dict[str, float], ...]:
    return (
        *(summary.ttft_ms, summary.tpot_ms, summary.itl_ms),
        *(summary.longest_gap_ms, summary.e2e_ms),
    )


def show(lines: Sequence[Sequence[str]]) -> None:
    """Print a table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        say("  ".join(cells).rstrip())


def publish(options: argparse.Namespace, measured: Sequence[Measured], *, command: str) -> None:
    """Print the table, warn of a slow generator, and write the files that were asked for."""
    lines = rows(measured, options.gpus)
    show(lines)
    lag_ms = max(one.lag_ms["p99"] for one in measured)
    if lag_ms > _MAX_LAG_MS:
        say(f"the generator was late by {lag_ms:.1f} ms (p99): shorter gaps are not to be trusted")
    if options.output is None:
        return
    about = facts() | {
        "hardware": options.hardware,
        "gpus": output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "note": options.note,
        "model": options.model,
        "server": options.url,
        "command": command,
    }
    config = str(getattr(options, "config", "") or "")
    if config:
        about["config"] = f"{config} (sha256 {config_hash(config)})"
    data = {
        **about,
        "workload": workload(options),
        "config_sha256": config_hash(config),
        "runs": [_figures(one, options.gpus) for one in measured],
    }
    folder: Path = options.output.parent
    folder.mkdir(parents=True, exist_ok=True)
    written = [options.output.with_name(options.output.name + end) for end in (".json", ".html")]
    written[0].write_text(json.dumps(data, indent=1) + "\n")
    about["workload"] = json.dumps(workload(options))
    written[1].write_text(page(about, lines, measured))
    picture = options.output.with_name(options.output.name + ".png")
    if write_picture(picture, measured):
        written.append(picture)
    say("written: " + ", ".join(map(str, written)))


def workload(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was sent, as JSON values."""
    names = (
        *(
            "api",
            "text",
            "vocab_size",
            "temperature",
            "respect_eos",
            "seed",
            "warmup",
            "rate",
            "cv",
        ),
        *("trace", "window", "first", "limit", "speed", "spread_ticks", "input_scale"),
        *("output_scale", "prompt_tokens", "output_tokens", "requests", "repeats", "concurrency"),
        *("find_rate", "slo_ttft", "slo_tpot", "slo_gap", "slo_e2e", "gpus"),
    )
    values = {name: getattr(options, name) for name in names}
    return {n: str(v) if isinstance(v, Path) else v for n, v in values.items() if v is not None}


def _figures(one: Measured, gpus: int) -> dict[str, Any]:
    good = one.run.repeats[-1].goodput_per_s
    per_gpu = None if good is None or not gpus else good / gpus
    began = min(result.sent for result in one.results)
    return {
        **asdict(one.run),
        "rate": one.rate,
        "generator_lag_ms": one.lag_ms,
        "goodput_per_s_per_gpu": per_gpu,
        "requests": [_request(result, began) for result in one.results],
    }


def _request(result: Result, began: float) -> dict[str, Any]:
    """One request in seconds; `sent` from the first one's."""
    about = {"sent": round(result.sent - began, 6), "prompt_tokens": result.prompt_tokens}
    if result.error:
        return {**about, "error": result.error}
    times = {name: round(result.figure(name), 6) for name in ("ttft", "tpot", "gap", "e2e")}
    return {**about, "output_tokens": result.output_tokens, **times}


def write_picture(path: Path, measured: Sequence[Measured]) -> bool:
    """Draw the distributions of TTFT, TPOT and longest gap, as PNG. False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("ttft", "tpot", "gap"), strict=True):
        for one in measured:
            points = distribution(one, name)
            axes.plot([x for x, _ in points], [y for _, y in points], label=one.run.label)
        axes.set(xlabel=f"{name.upper()}, ms", ylabel="% of requests", ylim=(0, 100), xlim=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def public(arguments: Sequence[str]) -> str:
    """A command line without the key."""
    shown, hide = [], False
    for argument in arguments:
        shown.append("..." if hide else argument)
        hide = argument == "--api-key"
    return shlex.join(a for a in shown if not a.startswith("--api-key="))
