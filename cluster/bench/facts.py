"""When, where and of which code something is measured, and figures as text."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from cluster.bench.measure import Summary


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


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


def commit() -> str:
    """The commit of this tree, `+` when there are changes on top; where this is no checkout, the
    installed version."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head:
        return head + ("+" if _git("status", "--porcelain", "-uno") else "")
    try:
        return f"baton {importlib.metadata.version('baton')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _git(*arguments: str) -> str:
    return output_of("git", "-C", str(Path(__file__).parent), *arguments)


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
    found = _field(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return found or platform.processor() or platform.machine()


def _memory() -> str:
    kilobytes = _field(Path("/proc/meminfo"), r"^MemTotal:\s*(\d+) kB$")
    return f"{int(kilobytes) / 2**20:.0f} GiB" if kilobytes else ""


def _field(path: Path, pattern: str) -> str:
    found: Any = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return str(found[1]) if found else ""
