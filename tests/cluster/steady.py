"""An autoscaled pool under a steady load a little above what one worker bears.

    python -m tests.cluster.steady --seconds 600 --report benchmarks/results/steady.md

Both pools may have one to three workers. Requests come at even times, at 1.15 times the rate of
prompt tokens that the one prefill worker had when it was busy. The pool must grow and then keep its
size; after the load it goes back to one worker.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.bench import facts
from cluster.models.store import find_model
from protocol.wire import inference_pb2 as wire
from tests.cluster.conftest import CHUNKED, MODEL, Baton
from tests.support import services
from tests.support.prompts import random_ids

PROMPT_TOKENS, OUTPUT_TOKENS = 400, 4
FACTOR = 1.15
PROBE_S = 30.0
IDLE_S = 600.0
SETTINGS = (
    "prefill.max_replicas=3",
    "decode.max_replicas=3",
    "scaling.keep_starts=5",
    "decode.engine.kv_memory_bytes=256MiB",
    "prefill.engine.kv_memory_bytes=256MiB",
)
TIMEOUT_S = 300.0


@dataclass
class Outcome:
    """The result of a run."""

    rate: float = 0.0  # prompt tokens per second of the one worker
    offered: float = 0.0
    finished: int = 0
    failed: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    #: When, in seconds since the load began, a pool's wanted size changed to what.
    changes: list[tuple[float, str, int]] = field(default_factory=list)
    load_s: float = 0.0


class Steady:
    """The cluster, the load and the sizes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.outcome = Outcome()
        self._admin = services.AdminStub(channel)
        self._inference = services.InferenceStub(channel)
        self._number = 0
        self._sizes: dict[str, int] = {}
        self._start = time.monotonic()

    async def ask(self) -> None:
        self._number += 1
        ids = [3 + token for token in random_ids(PROMPT_TOKENS, seed=self._number)]
        request = wire.GenerateRequest(
            prompt_token_ids=wire.TokenIds(ids=ids), max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        began, first = time.monotonic(), 0.0
        try:
            async for _ in self._inference.Generate(request, timeout=TIMEOUT_S):
                first = first or time.monotonic() - began
        except grpc.aio.AioRpcError as error:
            self.outcome.failed.append(f"{error.code().name}: {error.details()}")
            return
        self.outcome.finished += 1
        self.outcome.first_token_s.append(first)

    async def pools(self) -> dict[str, wire.Pool]:
        seen = await self._admin.GetCluster(wire.GetClusterRequest(), timeout=60)
        return {pool.role: pool for pool in seen.pools}

    async def look(self) -> None:
        """Note the sizes that changed."""
        for role, pool in (await self.pools()).items():
            if self._sizes.setdefault(role, pool.target) != pool.target:
                self._sizes[role] = pool.target
                now = time.monotonic() - self._start
                self.outcome.changes.append((now, role, pool.target))
                print(f"{now:.0f} s: {role} {pool.target}: {pool.reason}", flush=True)

    async def measure(self) -> float:
        """Prompt tokens per second of the prefill worker while it is busy, pools pinned."""
        end = time.monotonic() + PROBE_S

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask()

        begun = time.monotonic()
        before = self.outcome.finished
        await asyncio.gather(*(client() for _ in range(4)))
        return PROMPT_TOKENS * (self.outcome.finished - before) / (time.monotonic() - begun)

    async def run(self, seconds: float) -> Outcome:
        """The steady load, then none until the pools are at their least."""
        outcome = self.outcome
        outcome.offered = FACTOR * outcome.rate
        period = PROMPT_TOKENS / outcome.offered
        self._start, tasks = time.monotonic(), set()
        looked = due = self._start
        while (now := time.monotonic()) < self._start + seconds:
            if now >= due:
                task = asyncio.create_task(self.ask())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += period
            if now >= looked + 1.0:
                await self.look()
                looked = now
            await asyncio.sleep(max(0.0, min(due, looked + 1.0) - time.monotonic()))
        outcome.load_s = time.monotonic() - self._start
        await asyncio.gather(*tasks)
        end = time.monotonic() + IDLE_S
        while time.monotonic() < end and any(size > 1 for size in self._sizes.values()):
            await self.look()
            await asyncio.sleep(1.0)
        return outcome


async def steady(baton: Baton, seconds: float) -> Outcome:
    """Measure with pinned pools, then load them as they follow it."""
    async with grpc.aio.insecure_channel(str(baton.state()["grpc"])) as channel:
        run = Steady(channel)
        await asyncio.to_thread(baton.run, "scale", "--prefill", "1", "--decode", "1")
        await run.measure()  # the first steps are slower
        run.outcome.rate = await run.measure()
        run.outcome.failed.clear()
        run.outcome.first_token_s.clear()
        run.outcome.finished = 0
        await asyncio.to_thread(baton.run, "scale", "--prefill", "auto", "--decode", "auto")
        return await run.run(seconds)


def page(outcome: Outcome, command: str) -> str:
    """The record of a run."""
    during = [change for change in outcome.changes if change[0] <= outcome.load_s]
    after = [change for change in outcome.changes if change[0] > outcome.load_s]
    first = sorted(outcome.first_token_s) or [0.0]
    median, worst = first[len(first) // 2], first[int(0.99 * (len(first) - 1))]

    def told(changes: list[tuple[float, str, int]]) -> str:
        return ", ".join(f"{role} {size} at {at:.0f} s" for at, role, size in changes) or "none"

    return f"""# Steady load a little above one prefill worker, autoscaled

| what | value |
| --- | --- |
| one busy prefill worker | {outcome.rate:.0f} prompt tokens/s |
| offered, at even times | {outcome.offered:.0f} prompt tokens/s for {outcome.load_s:.0f} s |
| requests finished / failed | {outcome.finished} / {len(outcome.failed)} |
| changes during the load | {len(during)}: {told(during)} |
| changes afterwards | {len(after)}: {told(after)} |
| time to first token, median / p99 | {median:.2f} / {worst:.2f} s |

- machine: {facts.machine()}, Python {platform.python_version()}
- commit: {facts.commit()}
- command: `{command}`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and record with `--report`; 1 when a request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="steady-") as folder:
        baton = Baton(home=Path(folder) / "home", model=find_model(MODEL))
        try:
            baton.up("local-cpu.yaml", *CHUNKED, *SETTINGS)
            outcome = asyncio.run(steady(baton, args.seconds))
        finally:
            baton.run("down", "--now", check=False)
    text = page(outcome, f"python -m tests.cluster.steady --seconds {args.seconds:g}")
    print(text, *outcome.failed[:10], sep="\n")
    if args.report is not None:
        args.report.write_text(text)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
