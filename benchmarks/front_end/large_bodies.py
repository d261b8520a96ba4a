"""How large requests delay others: health checks and gaps of running streams beside bodies of
several sizes, with stub workers and the router in a process of its own.

    python -m benchmarks.front_end.large_bodies
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.front_end import __main__
from benchmarks.front_end.clients import SseClient
from cluster.bench.measure import percentile
from cluster.models.store import find_model

_POLL_S = 0.005
_SENTENCE = "the quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Bodies of one size, sent one after another over HTTP: `ids` as token ids, else as text."""

    name: str
    megabytes: float
    ids: bool = False

    def body(self) -> bytes:
        size = int(self.megabytes * 1e6)
        if self.ids:
            return json.dumps({"prompt": [1000 + i % 9000 for i in range(size // 6)]}).encode()
        return json.dumps({"prompt": (_SENTENCE * (size // len(_SENTENCE) + 1))[:size]}).encode()


DISTURBANCES = (
    Disturbance(name="none", megabytes=0),
    Disturbance(name="5 MB of text", megabytes=5),
    Disturbance(name="3 MB of token ids", megabytes=3, ids=True),
    Disturbance(name="30 MB of text", megabytes=30),
)


def _poll(address: str, seconds: float, out: multiprocessing.SimpleQueue[list[float]]) -> None:
    """Latencies of /health, requested every few milliseconds over one connection."""
    connection = http.client.HTTPConnection(address)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.perf_counter() - began)
        time.sleep(_POLL_S)
    out.put(times)


def _send(
    address: str,
    disturbance: Disturbance,
    seconds: float,
    out: multiprocessing.SimpleQueue[list[int]],
) -> None:
    """Status of each large request."""
    body, statuses = disturbance.body(), []
    end = time.perf_counter() + seconds
    while disturbance.megabytes and time.perf_counter() < end:
        connection = http.client.HTTPConnection(address)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        connection.close()
        time.sleep(0.2)
    out.put(statuses)


async def _streams(address: str, count: int, tokens: int) -> list[float]:
    """Gaps between tokens of streams that run all the while."""
    client = SseClient(f"http://{address}")
    readers = await asyncio.gather(*(client.ask(tokens) for _ in range(count)))
    await client.close()
    results = [read() for read in readers]
    assert not any(result.error for result in results), [r.error for r in results if r.error][:1]
    return [gap for result in results for gap in result.gaps]


def measure(address: str, disturbance: Disturbance, options: argparse.Namespace) -> str:
    """One line of the table."""
    gap_s = options.gap_ms / 1000
    seconds = options.tokens * gap_s
    health: multiprocessing.SimpleQueue[list[float]] = multiprocessing.SimpleQueue()
    sent: multiprocessing.SimpleQueue[list[int]] = multiprocessing.SimpleQueue()
    helpers = [
        multiprocessing.Process(target=_poll, args=(address, seconds, health)),
        multiprocessing.Process(target=_send, args=(address, disturbance, seconds, sent)),
    ]
    for helper in helpers:
        helper.start()
    gaps = asyncio.run(_streams(address, options.streams, options.tokens))
    times, statuses = health.get(), sent.get()
    for helper in helpers:
        helper.join()
    answers = f"{len(statuses)} x {', '.join(map(str, sorted(set(statuses))))}" if statuses else "-"
    return f"| {disturbance.name} | {answers} | {_percentiles(times)} | {_percentiles(gaps)} |"


def _percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    values = [percentile(ordered, 50), percentile(ordered, 99), ordered[-1]]
    return " / ".join(f"{1000 * value:.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_end.large_bodies")
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer is the router's")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between two tokens of a stream")
    options = parser.parse_args()
    options.model_path, options.profile = find_model(options.model), ""
    options.many = 1024
    print("| beside | answers | /health p50 / p99 / max ms | gap p50 / p99 / max ms |")
    print("| --- | --- | --- | --- |")
    with __main__.stack(options, options.gap_ms / 1000) as running:
        for disturbance in DISTURBANCES:
            print(measure(running.http, disturbance, options), flush=True)


if __name__ == "__main__":
    main()
