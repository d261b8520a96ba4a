"""Measure a running server and record it: `python -m benchmarks.serve --help`.

The options are those of `baton bench`; with `--theme` a report is written under
benchmarks/results. Any server with OpenAI's completions API will do, which is how peers are
compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from benchmarks import report
from cluster.bench.facts import say
from cluster.bench.options import add_load, add_requests, add_results
from cluster.bench.output import public, rows, show
from cluster.bench.runs import measure_now
from cluster.cli.arguments import add_connection
from protocol.errors import BatonError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description="Measure a server with an OpenAI API."
    )
    made.add_argument(
        "--url", default="http://127.0.0.1:8000", help="or https://, grpc://host:port"
    )
    add_connection(made)
    add_load(made.add_argument_group("load"))
    add_requests(made.add_argument_group("requests"))
    group = made.add_argument_group("report")
    add_results(group)
    report.add_options(group)
    return made


def _workload(options: argparse.Namespace) -> Iterator[str]:
    yield f"trace {options.trace.name}" if options.trace else "closed loop, streamed"
    yield f"{options.api}, " + ("text" if options.text or options.api == "chat" else "token ids")
    yield "ignore_eos" if not options.respect_eos else "may end early"
    yield f"temperature {options.temperature:g}, seed {options.seed}"
    yield f"warm-up {options.warmup} a client, {options.repeats} repeats"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a request failed, 2 when the server cannot be reached."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        measured = measure_now(options)
    except BatonError as error:
        say(error.message)
        return 2
    show(rows(measured, options.gpus))
    runs = [one.run for one in measured]
    report.write_if_asked(
        options,
        command=f"python -m benchmarks.serve {public(arguments)}",
        workload="; ".join(_workload(options)),
        runs=runs,
    )
    return int(any(summary.failures for one in runs for summary in one.repeats))


if __name__ == "__main__":
    sys.exit(main())
