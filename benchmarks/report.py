"""Write a result down: `results/<theme>_<hardware>_<date>.md` to read, `.json` with all figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Summary

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line of a report: what was sent, and every repeat's summary."""

    label: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    repeats: tuple[Summary, ...]

    def typical(self) -> Summary:
        """The repeat with the median rate of output tokens (the lower of two in the middle)."""
        ordered = sorted(self.repeats, key=lambda summary: summary.output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]


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


def say(text: str) -> None:
    """A line for the terminal, at once."""
    print(text, flush=True)


def facts(now: datetime | None = None, revision: str = "") -> dict[str, str]:
    """When, of which commit and where something is measured. `revision`: of what was measured,
    where this is no git checkout."""
    now = now or datetime.now(UTC)
    return {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": revision or commit(),
        "machine": machine(),
    }


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
        "the rates of all repeats. Definitions: benchmarks/measure.py.\n\n" + lines
    ) + (f"\n{report.details}" if report.details else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _row(run: Run) -> Sequence[str]:
    typical = run.typical()
    rates = ", ".join(f"{summary.output_tokens_per_s:.0f}" for summary in run.repeats)
    spent = (typical.ttft_ms, typical.tpot_ms, typical.itl_ms, typical.e2e_ms)
    return (
        run.label,
        f"{run.prompt_tokens} / {run.output_tokens}",
        f"**{typical.output_tokens_per_s:.1f}** ({rates})",
        *map(times, spent),
        str(sum(summary.failures for summary in run.repeats)),
    )


def times(milliseconds: dict[str, float], digits: int = 1) -> str:
    """Percentiles, one behind the other."""
    return " / ".join(f"{value:.{digits}f}" for value in milliseconds.values())


def overview(label: str, summaries: Sequence[Summary]) -> str:
    """One line for the terminal."""
    last = summaries[-1]
    text = (
        f"{label}: {last.output_tokens_per_s:.1f} tok/s"
        f" (median of {len(summaries)}: {median(s.output_tokens_per_s for s in summaries):.1f}),"
        f" TTFT {times(last.ttft_ms)} ms, TPOT {times(last.tpot_ms)} ms,"
        f" ITL {times(last.itl_ms)} ms, failed {last.failures}/{last.requests}"
    )
    return text + "".join(f"\n  {count} x {error}" for error, count in last.errors.items())


def slug(text: str) -> str:
    """Lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def commit() -> str:
    """The commit of this tree, `+` when there are changes on top."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return (head + ("+" if _git("status", "--porcelain", "-uno") else "")) or "unknown"


def _git(*arguments: str) -> str:
    return output_of("git", "-C", str(RESULTS), *arguments)


def output_of(*command: str) -> str:
    """What a command says; empty where it fails or there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def config_hash(config: str) -> str:
    """The first 12 digits of the digest of a config file; empty when there is none."""
    path = Path(config)
    return sha256(path.read_bytes()).hexdigest()[:12] if config and path.is_file() else ""


def machine() -> str:
    """Processor, cores and memory of this machine."""
    return ", ".join(filter(None, (processor(), f"{os.cpu_count()} cores", _memory())))


def processor() -> str:
    """The processor's name."""
    found = _field(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return found or platform.processor() or platform.machine()


def _memory() -> str:
    kilobytes = _field(Path("/proc/meminfo"), r"^MemTotal:\s*(\d+) kB$")
    return f"{int(kilobytes) / 2**20:.0f} GiB" if kilobytes else ""


def _field(path: Path, pattern: str) -> str:
    found: Any = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return str(found[1]) if found else ""
