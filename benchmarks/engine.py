"""The engine on one GPU against the limits of the card, measured in the same run.

    python -m benchmarks.engine --model llama-3.1-8b --out benchmarks/results/engine-h100.json
    python -m benchmarks.engine --model gemma-3-12b
    python -m benchmarks.engine --quantization fp8 --kv-dtype fp8 --short

Weights are random and made on the device; the KV pool holds random values. Decode steps are
launched as a worker launches them: step n + 1 before the tokens of step n are known. Every figure
is printed beside the limit that bounds it: the copy rate (bytes) or the matrix rate (arithmetic).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from statistics import median

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.engine_options import engine_parser, options_of
from benchmarks.gpu_limits import Limits, Report, begin_report, measure_all_reduce, profile
from benchmarks.random_weights import RandomSource
from benchmarks.ranks import Ranks
from benchmarks.shapes import MODELS, Tables, block_tables, kv_tokens, visible_pairs
from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cuda.comm import RankCollectives
from engine.cuda.pending import PendingTokens
from engine.cuda.runner import CudaRunner
from engine.model.families import parse_model_config
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
#: Tokens of a long context.
LONG = 32768


class Bench:
    """One engine and the figures of its limits."""

    def __init__(self, runner: CudaRunner, report: Report) -> None:
        self.runner = runner
        self.limits = report.limits
        self.report = report
        self._next = 0

    def tables(self, count: int, length: int) -> list[Tables]:
        """Block tables of `count` sequences of `length` tokens, one for each KV group, shuffled
        over the pool."""
        layout = self.runner.layout
        per_table, groups = -(-length // layout.block_size), len(layout.groups)
        order = torch.randperm(layout.num_blocks)[: count * groups * per_table].tolist()
        if len(order) < count * groups * per_table:
            raise SystemExit("the KV pool is too small for this shape")
        parts = [tuple(order[i : i + per_table]) for i in range(0, len(order), per_table)]
        return [tuple(parts[i : i + groups]) for i in range(0, len(parts), groups)]

    def decode_rows(
        self, tables: list[Tables], context: int, step: int, sampling: SamplingParams = GREEDY
    ) -> tuple[SequenceStep, ...]:
        """Decode rows of one of a series of steps, whose tokens are those of the step before."""
        layout, start = self.runner.layout, context + step
        return tuple(
            SequenceStep(
                tokens=(17,),
                start=start,
                block_tables=block_tables(table, layout, start),
                sampling=sampling,
                previous=i if step else None,
            )
            for i, table in enumerate(tables)
        )

    def pipelined(self, batches: Iterable[StepBatch]) -> list[tuple[float, float]]:
        """Run steps one ahead: when each but the last had ended, and how long its launch took."""
        pending: list[PendingTokens] = []
        times = []
        for batch in batches:
            began = time.perf_counter()
            pending.append(self.runner.launch(batch))
            launched = time.perf_counter() - began
            if len(pending) > 1:
                pending.pop(0).wait()
                times.append((time.perf_counter(), launched))
        pending.pop().wait()
        return times

    def decode(
        self, batch: int, context: int, steps: int, sampling: SamplingParams = GREEDY
    ) -> float:
        """Median seconds of a pipelined decode step; contexts grow from `context`."""
        tables = self.tables(batch, context + steps + 8)
        times = self.pipelined(
            StepBatch(sequences=self.decode_rows(tables, context, step, sampling))
            for step in range(steps + 6)
        )
        return median(b[0] - a[0] for a, b in pairwise(times[4:]))

    def report_decode(self, batch: int, context: int, steps: int) -> float:
        """Measure a decode shape and set it against the bytes it must read."""
        seconds = self.decode(batch, context, steps)
        weights = self.weight_bytes()
        kv = batch * self.kv_bytes(context + steps // 2)
        floor = (weights + kv) / self.limits.copy
        self.report.add(
            f"decode batch {batch} context {context}",
            ms=seconds * 1e3,
            tokens_per_s=batch / seconds,
            gigabytes=(weights + kv) / 1e9,
            ratio_to_copy=seconds / floor,
        )
        return seconds

    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads on this rank."""
        weights = self.runner.weights
        total = weights.head.nbytes
        for layer in weights.layers:
            total += layer.qkv.nbytes + layer.out.nbytes + layer.gate_up.nbytes + layer.down.nbytes
        return total

    def kv_bytes(self, context: int) -> int:
        """KV bytes that a decode row of so many tokens reads on this rank."""
        pool, windows = self.runner.pool, self._windows()
        return kv_tokens(windows, context) * pool.data[0, 0].nbytes // pool.block_size

    def _windows(self) -> list[int | None]:
        return self.runner.model_config.windows(self.runner.max_model_len)

    def prompts(self, count: int, length: int, repeats: int) -> list[float]:
        """Seconds of prompts of one length, packed into steps of the token budget."""
        per_step = max(1, self.runner.options.max_chunk_tokens // length)
        prompt = tuple(7 * i % 4000 for i in range(length))
        sequences = [
            SequenceStep(tokens=prompt, start=0, block_tables=table, sampling=GREEDY)
            for table in self.tables(count, length)
        ]
        batches = [
            StepBatch(sequences=tuple(sequences[first : first + per_step]))
            for first in range(0, count, per_step)
        ]
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            pending = [self.runner.launch(batch) for batch in batches]
            for step in pending:
                step.wait()
            times.append(time.perf_counter() - start)
        return times

    def prefill(self, count: int, length: int, repeats: int) -> None:
        """Prompts of one length against the matrix rate."""
        times = self.prompts(count, length, repeats + 2)
        seconds = median(times[2:])
        flops = self.prefill_flops(count, length)
        self.report.add(
            f"prefill {count} x {length}",
            ms=seconds * 1e3,
            first_ms=times[0] * 1e3,
            tokens_per_s=count * length / seconds,
            tflops=flops / seconds / 1e12,
            ratio_to_matrix=flops / seconds / self.limits.matrix,
        )

    def mixed(self, decodes: int, count: int, history: int, steps: int) -> None:
        """Pipelined steps of decode rows with 1,500 tokens of context beside a chunk of `count`
        prompt tokens that follow on `history`; without one of the two where it is 0."""
        tables = self.tables(decodes, 1500 + steps + 8)
        prompt = tuple(7 * i % 4000 for i in range(count))
        chunks = tuple(
            SequenceStep(
                tokens=prompt,
                start=history,
                block_tables=block_tables(table, self.runner.layout, history),
                sampling=GREEDY,
            )
            for table in self.tables(min(1, count), history + count)
        )
        times = self.pipelined(
            StepBatch(sequences=(*self.decode_rows(tables, 1500, step), *chunks))
            for step in range(steps + 6)
        )
        gaps = sorted(b[0] - a[0] for a, b in pairwise(times[4:]))
        self.report.add(
            f"mixed {decodes} decode rows, chunk of {count} after {history}",
            ms=median(gaps) * 1e3,
            p90_ms=gaps[len(gaps) * 9 // 10] * 1e3,
            launch_ms=median(entry[1] for entry in times[4:]) * 1e3,
        )

    def long_prompt(self, length: int, chunk: int, repeats: int) -> None:
        """One prompt in chunks, each behind the one before, against the matrix rate."""
        (table,) = self.tables(1, length)
        prompt = tuple(7 * i % 4000 for i in range(chunk))
        steps = [
            SequenceStep(
                tokens=prompt,
                start=start,
                block_tables=block_tables(table, self.runner.layout, start),
                sampling=GREEDY if start + chunk == length else None,
            )
            for start in range(0, length, chunk)
        ]
        self.pipelined(StepBatch(sequences=(step,)) for step in steps[:2])  # compiles
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.pipelined(StepBatch(sequences=(step,)) for step in steps)
            times.append(time.perf_counter() - start)
        flops = self.prefill_flops(1, length)
        self.report.add(
            f"prompt of {length} in chunks of {chunk}",
            ms=median(times) * 1e3,
            tokens_per_s=length / median(times),
            tflops=flops / median(times) / 1e12,
            ratio_to_matrix=flops / median(times) / self.limits.matrix,
        )

    def prefill_flops(self, count: int, length: int) -> float:
        """This rank's products of every prompt token, causal attention, the head once a prompt."""
        weights = self.runner.weights
        linear = (self.weight_bytes() - weights.head.nbytes) / weights.embedding.element_size()
        pairs = sum(visible_pairs(window, length) for window in self._windows())
        attention = 4 * pairs * weights.layers[0].out.shape[1]
        return count * (2 * length * linear + attention + 2 * weights.embedding.numel())


def build(
    args: argparse.Namespace,
    device: torch.device,
    ranks: Ranks,
    comm: RankCollectives | None,
    report: Report,
) -> CudaRunner:
    """An engine with random weights and a pool of random values, sized from what is free."""
    start = time.perf_counter()
    config = EngineConfig(
        model_path="random",
        dtype=args.dtype,
        device=str(device),
        tp_size=ranks.size,
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        kv_memory_bytes=None if args.kv_gib is None else args.kv_gib << 30,
    )
    runner = CudaRunner(
        config,
        parse_model_config(MODELS[args.model]),
        RandomSource(getattr(torch, args.dtype), device),
        options_of(args),
        rank=ranks.rank,
    )
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    num_blocks = ranks.smallest("blocks", runner.choose_num_blocks())
    sized = time.perf_counter()
    runner.open(num_blocks)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info(device)
    runner.start(comm)
    torch.cuda.synchronize()
    report.add(
        "build", weights_s=loaded - start, sizing_s=sized - loaded,
        plans_and_graphs_s=time.perf_counter() - sized,
        plans_and_graphs_mib=(free - torch.cuda.mem_get_info(device)[0]) / 2**20,
    )  # fmt: skip
    for layer in runner.pool.layers:
        for part in layer.split(1024):  # a whole layer has no room twice
            part.copy_(torch.randn_like(part, dtype=torch.bfloat16))
    return runner


def memory_figures(bench: Bench, free_before: int) -> None:
    """What share of the memory that was free after the weights holds KV blocks, where the pool's
    size followed from it."""
    pool, figures = bench.runner.pool.data.nbytes, {}
    if free_before:
        figures = {"free_after_weights_gib": free_before / 2**30, "kv_share": pool / free_before}
    bench.report.add("memory", kv_gib=pool / 2**30, **figures)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = engine_parser(__doc__)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--short", action="store_true", help="decode and prompts, in half a minute")
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--profile", default="64", help="batches with a table of kernels")
    parser.add_argument("--profile-prompt", type=int, default=0, help="a prompt with such a table")
    parser.add_argument("--context", type=int, default=LONG, help="tokens of a long context")
    parser.add_argument("--tp", type=int, default=1, help="ranks, one GPU each")
    parser.add_argument("--prompts", default="1x8192,8x2048", help="prompts of prefill steps")
    parser.add_argument(
        "--mixed-rows", default="0,16,64", help="decode rows of steps with a prompt chunk"
    )
    parser.add_argument("--chunks", default="64,128,256,512,1024,2048", help="their tokens")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--skip", default="", help="of: decode, long, prefill, mixed, chunked, profile"
    )
    args = parser.parse_args(argv)
    args.prompt_graphs &= not args.short
    return args


def followers(argv: Sequence[str], size: int, port: int) -> list[subprocess.Popen[bytes]]:
    """The other ranks: the same command with another rank."""
    command = [sys.executable, "-m", "benchmarks.engine", *argv, "--port", str(port)]
    return [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, size)]


def main(argv: Sequence[str] | None = None) -> None:
    """Start the other ranks, if any, and measure."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.tp == 1:
        run(args, Ranks(rank=0, size=1, store=None), argv)
        return
    lead = args.rank == 0
    store = TCPStore("127.0.0.1", args.port, args.tp, is_master=lead, wait_for_workers=False)
    processes = followers(argv, args.tp, store.port) if lead else []
    try:
        run(args, Ranks(rank=args.rank, size=args.tp, store=store), argv)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()


def run(
    args: argparse.Namespace, ranks: Ranks, argv: Sequence[str], limits: Limits | None = None
) -> Report:
    """Measure and print, as one rank; what was found. `limits`: of the card, where known."""
    skip = set(args.skip.split(","))
    device = torch.device("cuda", ranks.rank)
    torch.cuda.set_device(device)
    torch.manual_seed(7)
    report = begin_report("engine", argv, args, device, ranks.rank, ranks.size, limits)
    group = ranks.join(device)
    if group is not None:
        measure_all_reduce(group, device, report)
    bench = Bench(build(args, device, ranks, group, report), report)
    memory_figures(bench, bench.runner.free_after_weights)
    if args.short:
        short_table(bench, args.steps)
    else:
        measure(bench, ranks, args, skip)
    report.write(args.out)
    bench.runner.close()
    return report


def short_table(bench: Bench, steps: int) -> None:
    """One format of weights and KV in seconds: decode, prompts, a token of context, the pool."""
    seconds = {
        batch: bench.report_decode(batch, 512 if batch == 1 else 608, steps)
        for batch in (1, 16, 32, 64, 128, 256)
    }
    for count, length in ((1, 8192), (8, 2048)):
        bench.prefill(count, length, repeats=5)
    long = bench.report_decode(1, LONG, steps)
    layout = bench.runner.layout
    bench.report.add(
        "context",
        ns_per_token=(long - seconds[1]) / (LONG - 512) * 1e9,
        tokens_in_pool=layout.num_blocks // len(layout.groups) * layout.block_size,
    )
    print("| batch | ms | tokens/s |\n| --- | --- | --- |")
    for batch, time_s in seconds.items():
        print(f"| {batch} | {time_s * 1e3:.2f} | {batch / time_s:,.0f} |")


def measure(bench: Bench, ranks: Ranks, args: argparse.Namespace, skip: set[str]) -> None:
    """Everything about one engine."""
    if "decode" not in skip:
        for batch in map(int, args.batches.split(",")):
            bench.report_decode(batch, 512 if batch == 1 else 608, args.steps)
    if "long" not in skip:
        short = bench.report_decode(1, 512, args.steps)
        long = bench.report_decode(1, args.context, args.steps)
        extra = (bench.kv_bytes(args.context) - bench.kv_bytes(512)) / bench.limits.copy
        bench.report.add(
            "long context", extra_ms=(long - short) * 1e3, ratio=(long - short) / extra
        )
    if "prefill" not in skip:
        for prompts in args.prompts.split(","):
            count, length = map(int, prompts.split("x"))
            bench.prefill(count, length, repeats=5)
    if "mixed" not in skip:
        sizes = (map(int, text.split(",")) for text in (args.mixed_rows, args.chunks, "0,2048"))
        for rows, count, history in product(*sizes):
            bench.mixed(rows, count, history, args.steps)
    if "chunked" not in skip:
        length = min(131072, bench.runner.max_model_len // 8192 * 8192)
        bench.long_prompt(length, 8192, repeats=3 if length <= 32768 else 1)
    if "profile" not in skip:
        profiles(bench, ranks, args)


def profiles(bench: Bench, ranks: Ranks, args: argparse.Namespace) -> None:
    """Tables of kernels."""
    for batch in map(int, args.profile.split(",")):
        profile(bench.report, ranks, f"batch {batch}", partial(bench.decode, batch, 608))
    if args.profile_prompt:
        length = args.profile_prompt
        profile(bench.report, ranks, f"prompt {length}", partial(bench.prompts, 1, length))


if __name__ == "__main__":
    main()
