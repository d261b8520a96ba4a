"""Latency and processor time that the router adds to tokens: `python -m benchmarks.front_end`.

Three processes, none with an engine: stub workers that step like decode (`stub_worker`), the real
router (`stub_router`), and this one, the load. First `--streams` clients at the pace of `--gap-ms`,
over HTTP, over gRPC and straight from the workers: added time to first token, gaps between chunks.
Then rising rates (`--rates`, tokens/s over all streams): the highest rate that is fully delivered,
and the router's processor time a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import uvloop

from benchmarks import report
from benchmarks.front_end.clients import Client, DirectClient, GrpcClient, SseClient
from cluster.bench import facts
from cluster.bench.load import Reader
from cluster.bench.measure import Result, milliseconds
from cluster.models.store import find_model

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Clients that each send `requests` requests for `tokens` tokens, one after another."""

    streams: int
    tokens: int
    requests: int
    gap_s: float

    @property
    def offered_per_s(self) -> float:
        """Tokens a second that the workers emit when every client has a request running."""
        return self.streams / self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. Milliseconds; `cpu_us` is the router's processor time a token, all its threads.

    `rate` is tokens a second over the middle of the run, while every client has a request running.
    """

    way: str
    streams: int
    gap_ms: float
    offered: float
    rate: float
    cpu_us: float
    load_cpu_us: float
    ttft_ms: dict[str, float]
    gap_seen_ms: dict[str, float]
    tokens: int
    failures: tuple[str, ...]
    num_refused: int = 0
    refused_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Running processes: the router with its addresses, and what the stub workers printed."""

    pid: int
    http: str
    grpc: str
    workers: str

    def client(self, way: str, options: argparse.Namespace) -> Client:
        """A client by name: sse, grpc or direct."""
        if way == "direct":
            return DirectClient(self.workers)
        if way == "sse":
            return SseClient(f"http://{self.http}")
        return GrpcClient(self.grpc, channels=options.grpc_channels)


@contextmanager
def stack(options: argparse.Namespace, gap_s: float) -> Iterator[Stack]:
    """Stub workers stepping every `gap_s` and a router over them."""
    common = ["--model-path", str(options.model_path)]
    with _process("stub_worker", *common, "--gap-ms", str(gap_s * 1000)) as (_, workers):
        extra = ["--profile", options.profile] if options.profile else []
        extra += ["--max-requests", str(options.many)]
        with _process("stub_router", *common, "--workers", workers, *extra) as (pid, addresses):
            yield Stack(pid=pid, workers=workers, **json.loads(addresses))


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[tuple[int, str]]:
    """A module of this package as a process; its id and the first line it prints."""
    command = [sys.executable, "-m", f"benchmarks.front_end.{module}", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} ended before it was ready")
        yield process.pid, line.strip()
        assert process.stdin is not None
        process.stdin.close()


async def measure(
    stack: Stack,
    way: str,
    load: Load,
    options: argparse.Namespace,
    started: asyncio.Event | None = None,
) -> Figures:
    """Run a load one way; `started` is set once the clients are warm and begin."""
    client = stack.client(way, options)
    await client.open()
    try:
        await asyncio.gather(*(client.ask(4) for _ in range(load.streams)))  # connections, caches
        cpu, own, began = _cpu_s(stack.pid), time.process_time(), time.perf_counter()
        if started is not None:
            started.set()
        readers = await _clients(client, load)
        wall = time.perf_counter() - began
        cpu, own = _cpu_s(stack.pid) - cpu, time.process_time() - own
    finally:
        await client.close()
    results = [read() for read in readers]
    good = [result for result in results if not result.error]
    tokens = sum(len(result.chunk_times) for result in good)
    return Figures(
        way=way,
        streams=load.streams,
        gap_ms=load.gap_s * 1000,
        offered=load.offered_per_s,
        rate=_rate(good) if load.requests == 1 else tokens / wall,
        cpu_us=cpu / max(1, tokens) * 1e6,
        load_cpu_us=own / max(1, tokens) * 1e6,
        ttft_ms=milliseconds([result.ttft for result in good]),
        gap_seen_ms=milliseconds([gap for result in good for gap in result.gaps]),
        tokens=tokens,
        failures=tuple(result.error for result in results if result.error),
    )


async def _clients(client: Client, load: Load) -> list[Reader]:
    """All answers. Clients start one after another over the length of one answer, so that requests
    arrive evenly; with one request each they start together."""
    spread_s = load.tokens * load.gap_s / load.streams if load.requests > 1 else 0.0

    async def one(number: int) -> list[Reader]:
        await asyncio.sleep(number * spread_s)
        return [await client.ask(load.tokens) for _ in range(load.requests)]

    lists = await asyncio.gather(*(one(number) for number in range(load.streams)))
    return [reader for readers in lists for reader in readers]


def _rate(results: Sequence[Result]) -> float:
    """Tokens a second between the last start and the first end."""
    begin = max(result.chunk_times[0] for result in results)
    end = min(result.chunk_times[-1] for result in results)
    inside = sum(begin <= t <= end for result in results for t in result.chunk_times)
    return inside / (end - begin) if end > begin else 0.0


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


# --- the runs -------------------------------------------------------------------------------------


def pace_runs(options: argparse.Namespace) -> list[Figures]:
    """Every client at the set pace, over the same workers and router."""
    load = Load(
        streams=options.streams,
        tokens=options.tokens,
        requests=options.requests,
        gap_s=options.gap_ms / 1000,
    )
    found = []
    with stack(options, load.gap_s) as running:
        for way in ("direct", *options.ways):
            found.append(uvloop.run(measure(running, way, load, options)))
            print(_line(found[-1]), flush=True)
    return found


def rate_runs(options: argparse.Namespace) -> list[Figures]:
    """Every client at rising rates."""
    found = []
    for rate in options.rates:
        gap_s = options.streams / rate
        tokens = int(options.seconds / gap_s)
        load = Load(streams=options.streams, tokens=tokens, requests=1, gap_s=gap_s)
        with stack(options, gap_s) as running:
            for way in options.ways:
                found.append(uvloop.run(measure(running, way, load, options)))
                print(_line(found[-1]), flush=True)
    return found


def many_runs(options: argparse.Namespace) -> list[Figures]:
    """As many streams at once as the router admits, and requests beyond that meanwhile."""
    load = Load(streams=options.many, tokens=10, requests=1, gap_s=1.0)
    found = []
    for way in options.ways:
        with stack(options, load.gap_s) as running:
            found.append(uvloop.run(_many(running, way, load, options)))
        print(_line(found[-1]), flush=True)
    return found


async def _many(running: Stack, way: str, load: Load, options: argparse.Namespace) -> Figures:
    started = asyncio.Event()
    run = asyncio.create_task(measure(running, way, load, options, started))
    await started.wait()
    await asyncio.sleep(4.0)  # all of them have begun, none has ended
    refused, extra = [], SseClient(f"http://{running.http}")
    for _ in range(20):
        result = (await extra.ask(4))()
        if result.error.startswith("HTTP 429"):
            refused.append(result.ended - result.sent)
        await asyncio.sleep(0.1)
    await extra.close()
    return replace(await run, refused_ms=milliseconds(refused), num_refused=len(refused))


def _line(figures: Figures) -> str:
    failed = f", failed {len(figures.failures)}: {figures.failures[0]}" if figures.failures else ""
    if figures.num_refused:
        failed += f"; {figures.num_refused} of 20 beyond: 429 in {_times(figures.refused_ms)} ms"
    return (
        f"{figures.way:6} {figures.streams} streams, a token each {figures.gap_ms:.2f} ms:"
        f" offered {figures.offered:.0f}, delivered {figures.rate:.0f} tok/s;"
        f" router {figures.cpu_us:.1f} us a token (load {figures.load_cpu_us:.1f});"
        f" TTFT {_times(figures.ttft_ms)} ms; gap {_times(figures.gap_seen_ms)} ms{failed}"
    )


def _times(milliseconds: dict[str, float]) -> str:
    return facts.times(milliseconds, digits=2)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.front_end")
    made.add_argument("--model", default="smollm2-135m", help="its tokenizer is the router's")
    made.add_argument("--streams", type=int, default=32)
    made.add_argument("--tokens", type=int, default=64, help="of an answer, at the set pace")
    made.add_argument("--requests", type=int, default=8, help="of a client, at the set pace")
    made.add_argument("--gap-ms", type=float, default=20.0, help="between two tokens of a stream")
    made.add_argument("--rates", type=_numbers, default=[4000, 6000, 8000, 10000, 12000, 16000])
    made.add_argument("--seconds", type=float, default=4.0, help="of a run at one rate")
    made.add_argument("--ways", type=lambda text: text.split(","), default=["sse", "grpc"])
    made.add_argument("--grpc-channels", type=int, default=4, help="connections of the load")
    made.add_argument("--only", choices=("pace", "rates", "many"), default="")
    made.add_argument("--many", type=int, default=2000, help="streams at once, of a token a second")
    made.add_argument("--profile", default="", help="file for a profile of the router")
    made.add_argument("--theme", default="", help="write results/front_end/<theme>.json")
    return made


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print; write a result with `--theme`."""
    options = parser().parse_args()
    options.model_path = find_model(options.model)
    figures: list[Figures] = []
    if options.only in ("", "pace"):
        figures += pace_runs(options)
    if options.only in ("", "rates"):
        figures += rate_runs(options)
    if options.only in ("", "many"):
        figures += many_runs(options)
    if options.theme:
        data = {
            "load_before": os.getloadavg(),
            "command": shlex.join(["python", "-m", "benchmarks.front_end", *sys.argv[1:]]),
            "runs": [asdict(run) for run in figures],
        }
        print(report.write_figures("front_end", options.theme, data))


if __name__ == "__main__":
    main()
