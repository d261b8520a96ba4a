"""Write a result down: `results/<theme>_<hardware>_<date>.md` to read, `.json` with all figures."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.bench.facts import (
    config_hash,
    facts,
    processor,
    say,
    table,
    times,
)
from cluster.bench.measure import Run, Summary

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a reader needs to repeat a measurement. `details` (Markdown) ends the page,
    `data` is only in the file of figures."""

    theme: str
    hardware: str
    command: str
    server: str
    model: str
    workload: str
    note: str
    config: str
    runs: tuple[Run, ...]
    details: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of a measurement of a server that can be written down."""
    group.add_argument("--theme", default="", help="write a report under benchmarks/results")
    group.add_argument("--hardware", default="", help="name of the machine; default: processor")
    group.add_argument("--server", default="", help="what was measured: version, flags")
    group.add_argument("--config", default="", help="the config file the server was started with")
    group.add_argument("--note", default="")


def write_if_asked(
    options: argparse.Namespace, *, command: str, workload: str, runs: Sequence[Run]
) -> None:
    """With a theme, write the report of what was measured under these options."""
    if not options.theme:
        return
    made = Report(
        theme=options.theme,
        hardware=options.hardware or processor(),
        command=command,
        server=options.server,
        model=options.model,
        workload=workload,
        note=options.note,
        config=options.config,
        runs=tuple(runs),
    )
    say(f"written: {write(made)}")


def write_figures(folder: str, theme: str, data: dict[str, Any]) -> Path:
    """Figures as JSON: `results/<folder>/<theme>.json`."""
    path = RESULTS / folder / f"{slug(theme)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts(), **data}, indent=1) + "\n")
    return path


def write(
    report: Report, folder: Path = RESULTS, now: datetime | None = None, revision: str = ""
) -> Path:
    """Write both files; return the Markdown one. A second report of one day gets a number."""
    now = now or datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(report.theme)}_{slug(report.hardware)}_{now:%Y-%m-%d}"
    path, number = folder / f"{stem}.md", 2
    while path.exists():
        path, number = folder / f"{stem}_{number}.md", number + 1
    about = facts(now, revision)
    path.write_text(markdown(report, about))
    data = {**about, "config_sha256": config_hash(report.config), **asdict(report)}
    del data["details"]
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    return path


def markdown(report: Report, facts: dict[str, str]) -> str:
    """The page: a table of medians over repeats, then how to make it again."""
    names = ("TTFT ms", "TPOT ms", "ITL ms", "E2E ms")
    head = ["run", "tokens in / out", "output tok/s", *names, "failed"]
    about = {
        **facts,
        "model": report.model,
        "server": report.server,
        "workload": report.workload,
        "config": f"{report.config} (sha256 {config_hash(report.config)})" if report.config else "",
        "command": f"`{report.command}`",
        "note": report.note,
    }
    lines = "".join(f"- {name}: {value}\n" for name, value in about.items() if value)
    return (
        f"# {report.theme}, {report.hardware}\n\n{table(head, map(_row, report.runs))}\n"
        "Latencies are p50 / p90 / p99; each row is the repeat with the median rate; in brackets, "
        "the rates of all repeats. Definitions: cluster/bench/measure.py.\n\n" + lines
    ) + (f"\n{report.details}" if report.details else "")


def slug(text: str) -> str:
    """Lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def typical_of(run: Run) -> Summary:
    """The repeat with the median rate of output tokens (the lower of two in the middle)."""
    ordered = sorted(run.repeats, key=lambda summary: summary.output_tokens_per_s)
    return ordered[(len(ordered) - 1) // 2]


def _row(run: Run) -> Sequence[str]:
    typical = typical_of(run)
    rates = ", ".join(f"{summary.output_tokens_per_s:.0f}" for summary in run.repeats)
    spent = (typical.ttft_ms, typical.tpot_ms, typical.itl_ms, typical.e2e_ms)
    return (
        run.label,
        f"{run.prompt_tokens} / {run.output_tokens}",
        f"**{typical.output_tokens_per_s:.1f}** ({rates})",
        *map(times, spent),
        str(sum(summary.failures for summary in run.repeats)),
    )
