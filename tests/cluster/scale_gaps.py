"""The gaps of streams while the pool that computes prompts gets another worker and loses it again.

    python -m tests.cluster.scale_gaps --report benchmarks/results/scale-gaps.md

A few clients have long outputs all the time. Their longest gaps in three times of the same length
are compared: before, while prefill grows and shrinks again and again, and after.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc

from cluster.bench import facts
from cluster.models.store import find_model
from protocol.wire import inference_pb2 as wire
from tests.cluster.conftest import CHUNKED, MODEL, Baton
from tests.support import services
from tests.support.prompts import random_ids

PROMPT_TOKENS, OUTPUT_TOKENS = 40, 400
Gap = tuple[float, float]  # when it ended, seconds


async def client(
    stub: services.InferenceStub, number: int, gaps: list[Gap], end: asyncio.Event
) -> int:
    """Ask until the end; how many outputs were not whole."""
    failed = 0
    while not end.is_set():
        number += 1000
        ids = wire.TokenIds(ids=[3 + token for token in random_ids(PROMPT_TOKENS, seed=number)])
        request = wire.GenerateRequest(
            prompt_token_ids=ids, max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        last, count = 0.0, 0
        try:
            async for part in stub.Generate(request, timeout=300.0):
                now = time.monotonic()
                fresh = sum(len(choice.token_ids) for choice in part.choices)
                if last and fresh:
                    gaps.append((now, now - last))
                last, count = (now if fresh else last), count + fresh
        except grpc.aio.AioRpcError as error:
            print(f"failed: {error.code().name}: {error.details()}", file=sys.stderr)
        failed += count != OUTPUT_TOKENS
    return failed


async def scale(baton: Baton, size: int) -> None:
    await asyncio.to_thread(baton.run, "scale", "--prefill", str(size))


async def run(baton: Baton, clients: int, seconds: float, changes: int) -> list[str]:
    """The rows of the table."""
    gaps: list[Gap] = []
    end = asyncio.Event()
    async with grpc.aio.insecure_channel(str(baton.state()["grpc"])) as channel:
        stub = services.InferenceStub(channel)
        tasks = [asyncio.create_task(client(stub, i, gaps, end)) for i in range(clients)]
        await asyncio.sleep(10.0)  # all clients' first prompts
        times = [time.monotonic()]
        await asyncio.sleep(seconds)
        times.append(time.monotonic())
        for number in range(changes):
            await scale(baton, 1 + (number + 1) % 2)
        times.append(time.monotonic())
        await asyncio.sleep(seconds)
        times.append(time.monotonic())
        end.set()
        failed = sum(await asyncio.gather(*tasks))
    names = ("before", f"{changes} changes of prefill between 1 and 2", "after")
    rows = [f"outputs that failed: {failed}", "", "| | s | tokens | median, p99, longest gap, ms |"]
    rows.append("| --- | --- | --- | --- |")
    for name, start, stop in zip(names, times, times[1:], strict=False):
        part = sorted(gap * 1000.0 for at, gap in gaps if start <= at < stop)
        p99 = part[int(0.99 * len(part))]
        figures = f"{statistics.median(part):.0f} / {p99:.0f} / {part[-1]:.0f}"
        rows.append(f"| {name} | {stop - start:.0f} | {len(part)} | {figures} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--changes", type=int, default=4)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gaps-") as folder:
        baton = Baton(home=Path(folder) / "home", model=find_model(MODEL))
        baton.up("local-cpu.yaml", *CHUNKED)
        try:
            rows = asyncio.run(run(baton, args.clients, args.seconds, args.changes))
        finally:
            baton.run("down", check=False)
    text = "\n".join(
        [
            "# Gaps of streams while prefill changes its size",
            "",
            f"{args.clients} clients, {OUTPUT_TOKENS} tokens out. Commit {facts.commit()}, "
            f"{facts.machine()}.",
            *rows,
            "",
        ]
    )
    print(text)
    if args.report is not None:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
