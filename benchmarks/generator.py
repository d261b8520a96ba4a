"""How far the load generator itself distorts what it measures: `python -m benchmarks.generator`.

Stub servers in processes of their own stream tokens at a set pace to thousands of connections and
write the time of each token into its text. Both sides read the same monotonic clock, so the
difference is what the sockets and the generator add.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import uvloop

from cluster.bench import facts
from cluster.bench.http_stream import HttpClientConnection
from cluster.bench.load import Client, Monitor, Reader, Target, timed_arrivals
from cluster.bench.measure import Result, milliseconds, percentile
from cluster.bench.workload import Ask, Style

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def main() -> None:
    """Print one line of figures for each number of streams."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generator")
    parser.add_argument("--streams", default="500,1000,2000")
    parser.add_argument("--gap-ms", type=float, default=50.0, help="between tokens of a stream")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--servers", type=int, default=4, help="processes that stream")
    options = parser.parse_args()
    facts.say(json.dumps(facts.facts()))
    for streams in map(int, options.streams.split(",")):
        figures = measure(streams, options.gap_ms / 1000, options.tokens, options.servers)
        facts.say(json.dumps({"streams": streams, **figures}))


def measure(streams: int, gap_s: float, tokens: int, servers: int) -> dict[str, object]:
    """Milliseconds that tokens and gaps are off, for so many streams at once."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(servers):
        near, far = context.Pipe()
        process = context.Process(target=_serve, args=(far, gap_s), daemon=True)
        process.start()
        pipes.append(near)
        processes.append(process)
    try:
        ports = [pipe.recv() for pipe in pipes]
        return uvloop.run(_run(ports, streams, gap_s, tokens))
    finally:
        for process in processes:
            process.terminate()
            process.join()


async def _run(ports: Sequence[int], streams: int, gap_s: float, tokens: int) -> dict[str, object]:
    """All streams, begun over one gap so that their tokens are spread as those of requests."""
    answers: list[list[tuple[float, float]]] = []
    monitor, share = Monitor(), streams // len(ports)
    asks = [
        Ask(at=1.0 + gap_s * 20 * i / share, prompt_tokens=16, output_tokens=tokens)
        for i in range(share)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(
            timed_arrivals(
                StampedTarget(
                    answers=answers, url=f"http://127.0.0.1:{port}", style=Style(model="m")
                ),
                asks,
                monitor=monitor if port == ports[0] else None,
            )
            for port in ports
        )
    )
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    late = sorted(seen - sent for answer in answers for sent, seen in answer)
    off = sorted(
        abs((b[1] - a[1]) - (b[0] - a[0]))
        for answer in answers
        for a, b in itertools.pairwise(answer)
    )
    return {
        "tokens_per_s": round(len(late) / wall),
        "token_late_ms": milliseconds(late) | {"max": 1000 * late[-1]},
        "gap_off_ms": milliseconds(off) | {"p99.9": 1000 * percentile(off, 99.9)},
        "loop_lag_ms": milliseconds(monitor.lags) | {"max": 1000 * max(monitor.lags)},
        "cores": round(cpu / wall, 2),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedTarget(Target):
    """A stub server whose answers are kept as pairs of times: sent, received."""

    answers: list[list[tuple[float, float]]]

    def connect(self) -> Client:
        """A connection of one client."""
        return StampedClient(self)


class StampedClient:
    """Asks like `load.HttpClient`."""

    def __init__(self, target: StampedTarget) -> None:
        self._target = target
        self._connection = HttpClientConnection(target.url)

    async def ask(self, request: bytes, expected_tokens: int | None) -> Reader:
        """Send a request; its times are read after the run."""
        target = self._target
        answer = await self._connection.post("/", request, timeout_s=target.timeout_s)

        def read() -> Result:
            events = [(when, data) for when, data in answer.events() if data != "[DONE]"]
            assert len(events) == expected_tokens
            stamps = [json.loads(data)["choices"][0]["text"] for _, data in events]
            target.answers.append([(s, w) for s, (w, _) in zip(stamps, events, strict=True)])
            return Result(sent=answer.sent, ended=answer.ended)

        return read

    async def close(self) -> None:
        self._connection.close()


def _serve(pipe: Pipe, gap_s: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        tokens = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(_HEAD)
        due = time.perf_counter()
        for number in range(tokens):
            due += gap_s
            await asyncio.sleep(due - time.perf_counter())
            data = b'data: {"choices":[{"text":%.6f}]}\n\n' % time.perf_counter()
            if number == tokens - 1:
                data += b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
