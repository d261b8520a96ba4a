"""KV between a GPU's pool and host memory against the link, and what it costs the steps beside it.

    python -m benchmarks.kv_tiers --model llama-3.1-8b --out benchmarks/results/kv-tiers-h200.json

Every copy runs through a rank's own threads (kv_tiers.rank_tiers). The limit is one copy of as many
bytes between one piece of pinned memory and one of the GPU, measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Self

import torch

from benchmarks.engine import Bench, build
from benchmarks.engine_options import engine_parser
from benchmarks.gpu_limits import begin_report
from benchmarks.ranks import Ranks
from engine.batch import StepBatch
from engine.cuda.runner import CudaRunner
from kv_tiers.commands import Copy, CopyKind, CopyResult
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import RankTiers

Blocks = list[int]

#: Tokens of the prompts whose KV is stored while the next ones run.
_PROMPT = 2048


class Tiers:
    """A rank's tiers with host memory for as many blocks as a copy moves."""

    def __init__(self, runner: CudaRunner, num_slots: int) -> None:
        self._tiers = RankTiers(runner.pool, TierConfig())
        began = time.perf_counter()
        opened = self.copy(CopyKind.OPEN, [], [], number=num_slots)
        if not opened.ok:
            raise SystemExit("host memory is refused")
        self.open_s = time.perf_counter() - began

    def copy(self, kind: CopyKind, blocks: Blocks, slots: Blocks, *, number: int = 1) -> CopyResult:
        """Run one copy to its end."""
        done: Future[CopyResult] = Future()
        copy = Copy(number=number, kind=kind, blocks=tuple(blocks), slots=tuple(slots))
        self._tiers.submit(copy, done.set_result)
        return done.result(60)

    def close(self) -> None:
        self._tiers.close()


class Beside:
    """Repeats some work in another thread for the length of a block; counts it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.count = 0
        self._work = work
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._work()
            self.count += 1


def pinned_s(num_bytes: int, device: torch.device) -> float:
    """Seconds of one copy from pinned memory."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def timed(work: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def decode_s(bench: Bench, rows: int, steps: int) -> float:
    """Median seconds of a pipelined decode step of `rows` rows with 608 tokens and more."""
    tables = bench.tables(rows, 608 + steps + 8)
    times = bench.pipelined(
        StepBatch(sequences=bench.decode_rows(tables, 608, step)) for step in range(steps + 6)
    )
    return median(b[0] - a[0] for a, b in pairwise(times[4:]))


def prompt_s(bench: Bench, repeats: int) -> float:
    """Median seconds of a prompt of `_PROMPT` tokens."""
    return median(bench.prompts(1, _PROMPT, repeats + 2)[2:])


def measure(bench: Bench, device: torch.device, *, tokens: int, rows: int, steps: int) -> None:
    """All figures of one card."""
    runner, report = bench.runner, bench.report
    num_blocks = tokens // runner.layout.block_size
    blocks = torch.randperm(runner.layout.num_blocks)[:num_blocks].tolist()
    slots = list(range(num_blocks))
    num_bytes = num_blocks * runner.pool.data[:, 0].nbytes
    link_s = pinned_s(num_bytes, device)
    tiers = Tiers(runner, num_blocks)
    pool = runner.pool.data

    def load() -> None:
        tiers.copy(CopyKind.LOAD, blocks, slots)

    def store() -> None:
        tiers.copy(CopyKind.STORE, blocks[: rows // 16 or 1], slots[: rows // 16 or 1])

    def store_prompt() -> None:  # once while one runs
        began, count = time.perf_counter(), _PROMPT // runner.layout.block_size
        tiers.copy(CopyKind.STORE, blocks[:count], slots[:count])
        time.sleep(max(0.0, began + prompt_alone_s - time.perf_counter()))

    tiers.copy(CopyKind.STORE, blocks, slots)
    before = pool[:, blocks].clone()
    pool[:, blocks] = 0
    torch.cuda.synchronize()
    load()
    exact = bool(torch.equal(pool[:, blocks], before))
    del before
    load_s = timed(load)
    gigabytes = num_bytes / 1e9
    report.add(
        f"load {tokens} tokens", ms=load_s * 1e3, gigabytes=gigabytes, rate=gigabytes / load_s,
        link_rate=gigabytes / link_s, ratio_to_link=load_s / link_s, exact=exact,
        pin_s=tiers.open_s,
    )  # fmt: skip
    store_s = timed(lambda: tiers.copy(CopyKind.STORE, blocks, slots))
    report.add(f"store {tokens} tokens", ms=store_s * 1e3, ratio_to_link=store_s / link_s)
    bench.prefill(1, tokens, repeats=3)
    decode = partial(decode_s, bench, rows, steps)
    prompt = partial(prompt_s, bench, steps // 4)
    prompt_alone_s = prompt()
    for name, run, work in (
        (f"decode {rows} rows beside loads", decode, load),
        (f"decode {rows} rows beside stores of a step's new blocks", decode, store),
        (f"prompts of {_PROMPT} tokens beside stores of their blocks", prompt, store_prompt),
    ):
        report.add(name, **alone_and_beside(run, work))
    tiers.close()


def alone_and_beside(run: Callable[[], float], work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of `run`, alone and beside `work`, in turn, and how often `work` ran."""
    alone, both, count = [], [], 0
    for _ in range(3):
        alone.append(run())
        with Beside(work) as beside:
            both.append(run())
        count += beside.count
    ratio = min(both) / min(alone)
    return {"alone_ms": min(alone) * 1e3, "ms": min(both) * 1e3, "ratio": ratio, "copies": count}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    argv = sys.argv[1:] if argv is None else argv
    parser: argparse.ArgumentParser = engine_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=96)
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    report = begin_report("kv_tiers", argv, args, device, 0, 1)
    ranks = Ranks(rank=0, size=1, store=None)
    bench = Bench(build(args, device, ranks, None, report), report)
    measure(bench, device, tokens=args.tokens, rows=args.rows, steps=args.steps)
    report.write(args.out)
    bench.runner.close()


if __name__ == "__main__":
    main()
