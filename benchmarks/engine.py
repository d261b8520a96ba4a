"""The engine on one GPU against the limits of the card, measured in the same run.

    python -m benchmarks.engine --model llama-3.1-8b --out benchmarks/results/engine-h100.json

Weights are random and made on the device; the KV pool holds random values. Decode steps are launched
as a worker launches them: step n + 1 before the tokens of step n are known. Every figure is printed
beside the limit that bounds it: the copy rate (bytes) or the matrix rate (arithmetic).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cuda.comm import SingleRank
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner, PendingTokens
from engine.cuda.weights import RandomSource
from engine.model.config import ModelConfig
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
    }


MODELS = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "tiny": _llama(512, 1024, 2, 8) | {"vocab_size": 4096, "max_position_embeddings": 4096},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this card can do, measured just now: bytes/s of a copy (read + write), FLOP/s of bf16."""

    copy: float
    matrix: float


@dataclass(slots=True, kw_only=True)
class Report:
    """All figures of a run."""

    card: str
    torch: str
    commit: str
    command: str
    limits: Limits | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, **figures: Any) -> None:
        """Record and print one figure."""
        self.rows.append({"what": what, **figures})
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"{what}: {shown}", flush=True)


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run` on the current stream, by device events."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return median(times)


def measure_limits(device: torch.device) -> Limits:
    """Copy rate of 4 GiB and rate of an 8192^3 bf16 product, on random data."""
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source), 10)
    del source, target
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b.t())
    matrix = 2 * 8192**3 / timed(lambda: torch.mm(a, b.t()), 10)
    return Limits(copy=copy, matrix=matrix)


class Bench:
    """One engine and the figures of its limits."""

    def __init__(self, runner: CudaRunner, limits: Limits, report: Report) -> None:
        self.runner = runner
        self.limits = limits
        self.report = report
        self._next = 0

    def tables(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Block tables of `count` sequences of `length` tokens, shuffled over the pool."""
        per_sequence = -(-length // self.runner.layout.block_size)
        order = torch.randperm(self.runner.layout.num_blocks)[: count * per_sequence].tolist()
        if len(order) < count * per_sequence:
            raise SystemExit("the KV pool is too small for this shape")
        return [tuple(order[i * per_sequence : (i + 1) * per_sequence]) for i in range(count)]

    def decode(
        self, batch: int, context: int, steps: int, sampling: SamplingParams = GREEDY
    ) -> float:
        """Median seconds of a pipelined decode step; contexts grow from `context`."""
        tables = self.tables(batch, context + steps + 8)
        pending: list[PendingTokens] = []
        marks = []
        for step in range(steps + 6):
            sequences = tuple(
                SequenceStep(
                    tokens=(17,),
                    start=context + step,
                    block_ids=table,
                    sampling=sampling,
                    previous=i if step else None,
                )
                for i, table in enumerate(tables)
            )
            pending.append(self.runner.launch(StepBatch(sequences=sequences)))
            if len(pending) > 1:
                pending.pop(0).wait()
                marks.append(time.perf_counter())
        pending.pop(0).wait()
        gaps = [b - a for a, b in zip(marks[4:], marks[5:], strict=False)]
        return median(gaps)

    def report_decode(self, batch: int, context: int, steps: int, floor_of: str = "") -> float:
        """Measure a decode shape and set it against the bytes it must read."""
        seconds = self.decode(batch, context, steps)
        weights = self.weight_bytes()
        kv = batch * (context + steps // 2) * self.token_bytes()
        floor = (weights + kv) / self.limits.copy
        self.report.add(
            f"decode batch {batch} context {context}{floor_of}",
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

    def token_bytes(self) -> int:
        """KV bytes of one token on this rank."""
        pool = self.runner.pool
        return pool.data[:, 0].nbytes // pool.block_size

    def prefill(self, count: int, length: int, repeats: int) -> None:
        """Prompts of one length, packed into steps of the token budget, against the matrix rate."""
        per_step = max(1, self.runner.options.max_chunk_tokens // length)
        tables = self.tables(count, length)
        batches = []
        for first in range(0, count, per_step):
            batches.append(
                StepBatch(
                    sequences=tuple(
                        SequenceStep(
                            tokens=tuple((7 * i + first) % 4000 for i in range(length)),
                            start=0,
                            block_ids=table,
                            sampling=GREEDY,
                        )
                        for table in tables[first : first + per_step]
                    )
                )
            )
        times = []
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            pending = [self.runner.launch(batch) for batch in batches]
            for step in pending:
                step.wait()
            times.append(time.perf_counter() - start)
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

    def prefill_flops(self, count: int, length: int) -> float:
        """Products of every prompt token, causal attention, and the head once a prompt."""
        model = self.runner.model_config
        weights = self.runner.weights
        linear = (self.weight_bytes() - weights.head.nbytes) / weights.head.element_size()
        attention = 2 * length * length * model.num_heads * model.head_dim * model.num_layers
        return count * (2 * length * linear + attention + 2 * weights.head.numel())


def profile_decode(bench: Bench, batch: int, context: int, steps: int = 12) -> None:
    """Time per kernel of one decode step, and how long the device idles between steps."""
    from torch.profiler import ProfilerActivity, profile

    bench.decode(batch, context, 4)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.decode(batch, context, steps)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    spans = spans[len(spans) // 3 : -len(spans) // 6 or None]
    busy, reach = 0.0, spans[0][0]
    totals: dict[str, list[float]] = {}
    for start, end, name in spans:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
        entry = totals.setdefault(name[:70], [0.0, 0])
        entry[0] += end - start
        entry[1] += 1
    whole = reach - spans[0][0]
    bench.report.add(f"idle batch {batch}", idle_share=1.0 - busy / whole, span_us=whole)
    table = sorted(totals.items(), key=lambda item: -item[1][0])[:14]
    for name, (spent, count) in table:
        bench.report.add(f"  {name}", share=spent / whole, mean_us=spent / count, calls=int(count))


def build(model: str, device: torch.device, options: CudaOptions, dtype: str) -> CudaRunner:
    """An engine with random weights and a pool of random values, sized from what is free."""
    config = EngineConfig(model_path="random", dtype=dtype, device=str(device))
    runner = CudaRunner(
        config,
        ModelConfig.from_dict(MODELS[model]),
        RandomSource(getattr(torch, dtype), device),
        SingleRank(),
        options,
    )
    runner.open(runner.choose_num_blocks())
    for layer in runner.pool.layers:
        layer.normal_()
    return runner


def memory_figures(bench: Bench, free_before: int) -> None:
    """What share of the memory that was free after the weights holds KV blocks."""
    pool = bench.runner.pool.data.nbytes
    bench.report.add(
        "memory", kv_gib=pool / 2**30, free_after_weights_gib=free_before / 2**30,
        kv_share=pool / free_before,
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--commit", default=None, help="recorded instead of asking git")
    parser.add_argument("--skip", default="", help="of: decode, long, prefill, profile")
    return parser.parse_args(argv)


def commit() -> str:
    """The commit that is measured."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse(argv)
    skip = set(args.skip.split(","))
    device = torch.device("cuda", torch.cuda.current_device())
    report = Report(
        card=torch.cuda.get_device_name(device),
        torch=f"{torch.__version__}, python {platform.python_version()}",
        commit=args.commit or commit(),
        command=f"python -m benchmarks.engine --model {args.model}",
    )
    limits = report.limits = measure_limits(device)
    report.add("limits", copy_tb_s=limits.copy / 1e12, matrix_tflops=limits.matrix / 1e12)
    torch.cuda.empty_cache()
    start = time.perf_counter()
    runner = build(args.model, device, CudaOptions(max_batch=args.max_batch), args.dtype)
    report.add("build", seconds=time.perf_counter() - start)
    bench = Bench(runner, limits, report)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info(device)
    memory_figures(bench, runner.free_after_weights)
    report.add("left free", gib=free / 2**30)
    if "decode" not in skip:
        for batch in map(int, args.batches.split(",")):
            bench.report_decode(batch, 512 if batch == 1 else 608, args.steps)
    if "long" not in skip:
        short = bench.report_decode(1, 512, args.steps)
        long = bench.report_decode(1, 32768, args.steps)
        extra = (32768 - 512) * bench.token_bytes() / limits.copy
        report.add("long context", extra_ms=(long - short) * 1e3, ratio=(long - short) / extra)
    if "prefill" not in skip:
        bench.prefill(1, 8192, 5)
        bench.prefill(8, 2048, 3)
    if "profile" not in skip:
        for batch in (64, 1, 32):
            profile_decode(bench, batch, 608)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
