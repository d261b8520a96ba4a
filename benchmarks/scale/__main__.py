"""Measures all of benchmarks.scale.

python -m benchmarks.scale --workers 1000 --report benchmarks/results/scale.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from pathlib import Path

from benchmarks.scale import router
from cluster.bench import facts


def page(num_workers: int, command: str) -> str:
    """All figures, as Markdown."""
    counts = (4, 100, num_workers)
    measured = {count: asyncio.run(router.measure(count)) for count in counts}
    rows = [
        (name, *(f"{median:.3f} / {worst:.3f}" for median, worst in by_count))
        for name in measured[num_workers]
        if (by_count := [measured[count][name] for count in counts])
    ]
    head = ("milliseconds of CPU, median / p99", *(f"{n} + {n} workers" for n in counts))
    from benchmarks.scale import directory

    members = directory.measure(num_workers)
    noted = {**facts.facts(), "command": f"`{command}`"}
    return "\n".join(
        [
            f"# {num_workers} workers of each pool, as stubs",
            "",
            facts.table(("", ""), noted.items()),
            "## A router",
            "",
            facts.table(head, rows),
            f"A prefix index of {router.POOL_BLOCKS:,} blocks takes "
            f"{router.prefix_bytes() / 1e6:.2f} MB while it changes.",
            "",
            f"## The directory, with {num_workers} workers and {directory.ROUTERS} routers in "
            f"{directory.PROCESSES} processes",
            "",
            facts.table(("", ""), members.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of a large cluster, with stub workers.")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    # Ray reads it when it is imported, and would write a token into the user's home.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # The directory has a core to itself in a cluster; here it shares two with all stubs, as equals.
    os.environ |= {"RAY_worker_niceness": "0"}
    text = page(args.workers, f"python -m benchmarks.scale --workers {args.workers}")
    print(text)
    if args.report is not None:
        args.report.write_text(text + "\n")


if __name__ == "__main__":
    main()
