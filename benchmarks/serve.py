"""Measure a running server: `python -m benchmarks.serve --help`.

Closed loop: python -m benchmarks.serve --concurrency 1,4,16 --prompt-tokens 128 --output-tokens 64
Arrivals:    python -m benchmarks.serve --trace azure2023_conv.csv --speed 0.5 --limit 200
Any server with OpenAI's completions API will do, which is how peers are compared. `ignore_eos` and
prompts of token ids are sent unless `--respect-eos`, `--text` or `--api chat` say otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.front_end.http_stream import Connection
from benchmarks.load import GRPC, Target, closed_loop, timed_arrivals
from benchmarks.measure import Slo, Summary, summarise
from benchmarks.workload import Ask, Style, fit_trace, read_trace, spread_ticks
from cluster.cli.arguments import add_connection
from cluster.client import ClientTls, client_tls
from protocol.errors import InvalidRequest


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description="Measure a server with an OpenAI API."
    )
    _add_server(made.add_argument_group("server"))
    _add_load(made.add_argument_group("load"))
    group = made.add_argument_group("report")
    report.add_options(group)
    group.add_argument("--slo-ttft", type=float, metavar="SECONDS")
    group.add_argument("--slo-tpot", type=float, metavar="SECONDS")
    return made


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", help="or https://, grpc://host:port"
    )
    group.add_argument("--model", default="", help="default: the first that is served")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    add_connection(group)
    group.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--concurrency", type=_numbers, default=[1, 4, 16], metavar="N,N,...")
    group.add_argument("--prompt-tokens", type=int, default=128, help="clips those of a trace")
    group.add_argument("--output-tokens", type=int, default=64, help="clips those of a trace")
    group.add_argument("--requests", type=int, default=0, help="a run; default 4 a client, >= 8")
    group.add_argument("--warmup", type=int, default=2, help="requests a client, not counted")
    group.add_argument("--repeats", type=int, default=3)
    group.add_argument("--text", action="store_true", help="words instead of token ids")
    group.add_argument("--vocab-size", type=int, default=49152)
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--respect-eos", action="store_true", help="let the model end early")
    add_seed(group)
    group.add_argument("--trace", type=Path, help="arrivals from a file instead of a closed loop")
    group.add_argument("--speed", type=float, default=1.0, help="replay a trace this much faster")
    group.add_argument("--limit", type=int, default=200, help="requests of a trace")
    group.add_argument("--spread-ticks", action="store_true", help="for traces with coarse clocks")


def add_seed(group: argparse._ActionsContainer) -> None:
    """What prompts are made from: without it no run meets those of an earlier one in a cache."""
    drawn = random.randrange(1 << 32)
    group.add_argument("--seed", type=int, default=drawn, help="of prompts; default: drawn")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("clients are counted from 1")
    return numbers


async def run(options: argparse.Namespace) -> list[report.Run]:
    """Every run that the options ask for, announced as it ends."""
    if not options.model and not options.url.startswith(GRPC):
        options.model = await first_model(options.url, options.api_key, client_tls(options))
    slo = None
    if options.slo_ttft is not None and options.slo_tpot is not None:
        slo = Slo(ttft=options.slo_ttft, tpot=options.slo_tpot)
    if options.trace:
        return [await _trace(options, slo)]
    return [await _closed(options, clients, slo) for clients in options.concurrency]


async def _closed(options: argparse.Namespace, clients: int, slo: Slo | None) -> report.Run:
    ask = Ask(prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens)
    count = options.requests or max(8, 4 * clients)
    target = _target(options)
    # Numbers determine the prompts: none is sent twice in a run, so no prefix cache can help.
    first = 1_000_000 * clients
    warm = [ask] * (options.warmup * clients)
    if warm:
        await closed_loop(target, warm, concurrency=clients, first_number=first)
    label = f"{clients} client{'s' if clients > 1 else ''}"
    summaries: list[Summary] = []
    for _ in range(options.repeats):
        first += max(count, len(warm))
        results = await closed_loop(target, [ask] * count, concurrency=clients, first_number=first)
        summaries.append(summarise(results, slo))
        report.say(report.overview(label, summaries))
    return report.Run(
        label=label,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        concurrency=clients,
        repeats=tuple(summaries),
    )


async def _trace(options: argparse.Namespace, slo: Slo | None) -> report.Run:
    asks = read_trace(options.trace)
    if options.spread_ticks:
        asks = spread_ticks(asks)
    asks = fit_trace(
        asks,
        limit=options.limit,
        speed=options.speed,
        max_prompt=options.prompt_tokens,
        max_output=options.output_tokens,
    )
    target = _target(options)
    if options.warmup:
        await closed_loop(target, asks[: options.warmup], concurrency=1, first_number=1_000_000)
    summary = summarise(await timed_arrivals(target, asks), slo)
    label = f"{options.trace.name} x{options.speed:g}"
    report.say(report.overview(label, [summary]))
    return report.Run(
        label=label,
        prompt_tokens=summary.prompt_tokens,
        output_tokens=summary.output_tokens,
        concurrency=None,
        repeats=(summary,),
    )


def _target(options: argparse.Namespace) -> Target:
    style = Style(
        api=options.api,
        text=options.text,
        model=options.model,
        vocab_size=options.vocab_size,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=not options.respect_eos,
    )
    return Target(
        url=options.url,
        style=style,
        timeout_s=options.timeout,
        api_key=options.api_key or "",
        tls=client_tls(options),
    )


async def first_model(url: str, api_key: str | None = None, tls: ClientTls | None = None) -> str:
    """The first model that the server lists. Raises OSError when it does not."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = Connection(url, headers, tls)
    try:
        answer = await connection.get("/v1/models", timeout_s=30)
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"HTTP {answer.status}: {answer.body.decode(errors='replace')}")
    return str(json.loads(answer.body)["data"][0]["id"])


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
        runs = asyncio.run(run(options))
    except InvalidRequest as error:
        report.say(error.message)
        return 2
    except OSError as error:
        report.say(
            f"{options.url}: {error} (if it wants TLS: --tls or --tls-ca, https:// in a URL)"
        )
        return 2
    report.write_if_asked(
        options, command=command_line(arguments), workload="; ".join(_workload(options)), runs=runs
    )
    return int(any(summary.failures for one in runs for summary in one.repeats))


def command_line(arguments: Sequence[str]) -> str:
    """The command to write down, without the key."""
    public, hide = [], False
    for argument in arguments:
        public.append("..." if hide else argument)
        hide = argument == "--api-key"
    joined = shlex.join(a for a in public if not a.startswith("--api-key="))
    return f"python -m benchmarks.serve {joined}"


if __name__ == "__main__":
    sys.exit(main())
