"""`baton usage`: what each API key has used, from the lines of `router.settings.access_log`."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from cluster.cli.console import Console

#: What collects logs may put something before; names that clients write come behind `="`.
_LINE = re.compile(r'(?:(?!=").)*?(\d{4}-\d\d-\d\d) [\d:,]+ INFO baton\.access request (.*)')
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ ]*)(?: |$)')
#: The last field of a line: one without it is cut short, as when its router was killed.
_LAST = "seconds"
HEADER = ("day", "key", "requests", "failed", "input_tokens", "cached_tokens", "output_tokens")


def run(options: argparse.Namespace, console: Console) -> None:
    """Print a table in CSV: a line for each day and key."""
    with ExitStack() as stack:
        files: list[TextIO] = [
            stack.enter_context(Path(name).open(errors="replace")) for name in options.logs
        ]
        lines = (line for file in files or [sys.stdin] for line in file)
        console.write(report(lines))


def report(lines: Iterable[str]) -> str:
    """CSV of the use by day (of the router's clock) and key. Input tokens that a prefix cache had
    are `cached_tokens`, the others `input_tokens`."""
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for day, fields in _requests(lines):
        use = found[day, fields.get("key", "")]
        cached = int(fields.get("cached_tokens", 0))
        use["requests"] += 1
        use["failed"] += fields.get("code") != "ok"
        use["input_tokens"] += int(fields.get("prompt_tokens", 0)) - cached
        use["cached_tokens"] += cached
        use["output_tokens"] += int(fields.get("output_tokens", 0))
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(HEADER)
    table.writerows(
        (*place, *(use[name] for name in HEADER[2:])) for place, use in sorted(found.items())
    )
    return out.getvalue()


def _requests(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        pairs = _PAIR.findall(match[2].strip())
        with suppress(ValueError):  # of a text that is cut short
            fields = {k: json.loads(v) if v[:1] == '"' else v for k, v in pairs}
            if _LAST in fields:
                yield match[1], fields
