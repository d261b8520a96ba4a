"""What KV tiers bring on a machine without a GPU: `python -m tests.support.tiers_bench --help`.

A router, a prefill and a decode worker with SmolLM2 in float32 in this process, asked over HTTP by
`benchmarks.conversations` or `benchmarks.sessions`, whose options follow `--`; once for each kind
of tiers, which take turns in `--rounds`, so that other work on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks import conversations, sessions
from cluster.bench import facts
from cluster.bench.measure import Run
from kv_tiers import disk
from kv_tiers.config import TierConfig
from router.config import RouterConfig
from tests.support.smollm2 import model_folder
from tests.support.stack import running_stack

#: Of SmolLM2-135M in float32.
TOKEN_BYTES = 45 << 10
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Pools of `pool_tokens` each, and what is below them. `disk_rate`: bytes per second that files
    are throttled to."""

    name: str
    pool_tokens: int
    host_tokens: int = 0
    disk: bool = False
    disk_rate: float = 0.0


def kinds(options: argparse.Namespace) -> list[Kind]:
    """What is compared."""
    pool, host, little = options.pool_tokens, options.host_tokens, options.little_tokens
    found = [
        Kind(name="all fit, no tiers", pool_tokens=options.all_tokens),
        Kind(name="pools only", pool_tokens=pool),
        Kind(name="+ host", pool_tokens=pool, host_tokens=host),
        Kind(name="+ little host, disk", pool_tokens=pool, host_tokens=little, disk=True),
        Kind(
            name="+ little host, disk at 20 MB/s",
            pool_tokens=pool,
            host_tokens=little,
            disk=True,
            disk_rate=20e6,
        ),
    ]
    return [kind for number, kind in enumerate(found) if str(number) in options.kinds]


@contextmanager
def _throttled(rate: float) -> Any:
    """Every read of a file of KV takes as long as at `rate`."""
    real = disk._read_all

    def read(file: int, part: memoryview) -> bool:
        time.sleep(len(part) / rate)
        return real(file, part)

    with mock.patch.object(disk, "_read_all", read if rate else real):
        yield


async def measure(kind: Kind, options: argparse.Namespace) -> tuple[list[Run], dict[str, Any]]:
    """The runs of one kind, and counters of both workers at the end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _throttled(kind.disk_rate):
        tiers = TierConfig(
            host_bytes=kind.host_tokens * TOKEN_BYTES,
            disk_path=folder if kind.disk else "",
            peers=options.peers,
        )
        async with running_stack(
            str(model_folder()),
            router={"local_prefill_tokens": RouterConfig(model_path="x").local_prefill_tokens},
            prefill_blocks=kind.pool_tokens // BLOCK,
            decode_blocks=kind.pool_tokens // BLOCK,
            tiers=tiers,
        ) as stack:
            asked = ["--url", f"http://{stack.http}", *options.arguments]
            if options.what == "sessions":
                own = sessions.parser().parse_args(asked)
                answered = await sessions.run(own, sessions.sessions_of(own))
                runs = [sessions.run_of(own, answered)]
                outputs: Any = None
            else:
                own = conversations.parser().parse_args(asked)
                repeats = await conversations.run(own)
                runs = conversations.runs_of(own, repeats)
                outputs = [turns.outputs for turns in repeats]
            await stack.pair.stored()
            workers = [*stack.pair.prefills, *stack.pair.decodes]
            counters = {
                f"{worker.ref.role} {name}": count
                for worker in workers
                for name, count in worker.status().counters.items()
                if "kv_tier" in name and count
            }
    return runs, {"outputs": outputs, "counters": counters}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.support.tiers_bench")
    made.add_argument("what", choices=["conversations", "sessions"])
    made.add_argument("--all-tokens", type=int, default=12_000, help="pools that hold everything")
    made.add_argument("--pool-tokens", type=int, default=2_400, help="pools that do not")
    made.add_argument("--host-tokens", type=int, default=40_000, help="host memory of each worker")
    made.add_argument("--little-tokens", type=int, default=2_000, help="the same above files")
    made.add_argument("--kinds", default="01234", help="which, in the order of the table")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--peers", action="store_true", help="workers lend each other KV")
    made.add_argument("--folder", help="of the files; default: that of temporary files")
    made.add_argument("--output", type=Path, help="figures as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a request failed or outputs differ."""
    argv = sys.argv[1:] if argv is None else argv
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    options = parser().parse_args(own)
    options.arguments = list(argv[len(own) + 1 :])
    torch.set_num_threads(1)
    found: dict[str, list[list[Run]]] = {}
    counters: dict[str, Any] = {}
    outputs = []
    for _ in range(options.rounds):
        for kind in kinds(options):
            runs, more = asyncio.run(measure(kind, options))
            found.setdefault(kind.name, []).append(runs)
            counters[kind.name] = more["counters"]
            outputs.append(more["outputs"])
            figures = {
                **facts.facts(),
                "command": f"python -m tests.support.tiers_bench {shlex.join(argv)}",
                "outputs_equal": all(each == outputs[0] for each in outputs),
                "counters": counters,
                "runs": {name: list(map(asdict, _merged(each))) for name, each in found.items()},
            }
            if options.output is not None:
                options.output.write_text(json.dumps(figures, indent=1) + "\n")
    merged = {name: _merged(each) for name, each in found.items()}
    for name, runs in merged.items():
        for run in runs:
            parts = [
                f"{what} {median(getattr(r, what)[p] for r in run.repeats):.0f}"
                for what, p in (("ttft_ms", "p50"), ("ttft_ms", "p90"), ("itl_ms", "p99"))
            ]
            facts.say(f"{name:32} {run.label:40} {' '.join(parts)}")
    failures = sum(s.failures for runs in merged.values() for run in runs for s in run.repeats)
    equal = all(each == outputs[0] for each in outputs)
    facts.say(f"outputs equal: {equal}")
    return int(bool(failures) or not equal)


def _merged(rounds: Sequence[Sequence[Run]]) -> list[Run]:
    """Each line of all rounds."""
    lines = zip(*rounds, strict=True)
    return [
        replace(line[0], repeats=tuple(s for run in line for s in run.repeats)) for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
