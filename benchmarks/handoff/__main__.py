"""The hand-off between two GPUs of one host against the rates of the bare link.

    python -m benchmarks.handoff --out benchmarks/results/handoff-2xh100.json

Two processes, each seeing one GPU, run the real sender and receiver over the real control channel;
KV is random, there is no model. The raw rates come first: NCCL send/recv and contiguous copies
through CUDA IPC. Then, for each backend, layout and prompt length:

- alone: one hand-off at a time, all of its KV finished at once; `commit_ms` is from the end of
  prefill (the push) to decode owning the sequence, and `alone` the rate over that time.
- ahead: a prompt's products run on prefill's GPU in chunks; layers are sent behind them.
- stream: several hand-offs in flight, as under load; `stream` is the sustained rate, and
  `*_loop_ms` the processor time of either worker's event loop for one hand-off, grant included.

Rates are in GB/s of KV; the ratios are to the best raw rate of the same kind of link in this run.
The ranks of a tensor-parallel worker are distributed over its GPUs, several on one if it has fewer;
the raw rate is then that of one GPU times the GPUs of the worker with fewer. With more than two
GPUs every rank is a process of its own, as in production.

On one GPU (`--decode-gpus 0`, `--backends cuda_ipc`) the link is the GPU's own memory, many times
as fast, so that `stream` measures the software. A GPU may be named twice, for two ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.handoff.process import Process
from benchmarks.handoff.worker import Handoff, make_handoff
from cluster.bench import facts
from cluster.bench.measure import milliseconds
from kv_transfer.config import BackendName, TransferConfig
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVLayout

MIB = 1 << 20
LAYERS = {"8b": 32, "70b": 80}
_HEADS, _HEAD_DIM, _BLOCK = 8, 128, 16
_RAW_SIZES = tuple(size * MIB for size in (16, 64, 256, 1024))
_SEED_CHECK_BLOCKS = 128
_LONGEST_AHEAD = 8192
_BUSY_ROUNDS = 48  # about five steps each: with fewer the 99th percentile is the maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the result. Rates in GB/s, times in ms, ratios to the raw link."""

    backend: str
    layout: str
    ranks: str
    tokens: int
    mib: float
    commit_ms: float
    commit_ms_worst: float
    alone: float
    alone_ratio: float
    stream: float
    stream_ratio: float
    prefill_loop_ms: float
    decode_loop_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Prompts that are computed while their KV moves, one at a time. Times in ms: `prefill` without
    and with the hand-off beside it; `commit` from the end of the computation on the device to
    decode owning the sequence; `exposed` is its share of the time from the first chunk to there."""

    backend: str
    tokens: int
    chunk: int
    prefill_alone_ms: float
    prefill_ms: float
    commit_ms: float
    commit_ms_worst: float
    exposed: float


class Bench:
    """The two processes and the raw rates between them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.prefill = Process(Role.PREFILL, *args.prefill_gpus)
        self.decode = Process(Role.DECODE, *args.decode_gpus)
        self.raw: dict[str, dict[int, float]] = {}
        self.refs: tuple[WorkerRef, WorkerRef]
        self.num_blocks = 0
        self._numbers = iter(range(1 << 30))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def both(self, name: str, *args: Any) -> tuple[Any, Any]:
        """The same command on both workers at once."""
        self.prefill.start(name, *args)
        self.decode.start(name, *args)
        return self.prefill.result(), self.decode.result()

    def measure_raw(self) -> None:
        """GB/s of single messages, by kind of link and size."""
        repeats = 20
        if "nccl" in self.args.backends:
            name = self.prefill.do("nccl_name")
            times, _ = self.both("raw_nccl", name, self.args.nccl_ctas, _RAW_SIZES, repeats)
            self.raw["nccl"] = _rates(times)
        handle, offset = self.decode.do("export", max(_RAW_SIZES))
        times = self.prefill.do("raw_copy", handle, offset, _RAW_SIZES, repeats)
        self.raw["cuda_ipc"] = _rates(times)
        for kind, rates in self.raw.items():
            print(f"raw {kind:8}", *(f"{s // MIB} MiB {r:.0f}" for s, r in rates.items()), "GB/s")

    def build(self, backend: str, layers: int, tp: tuple[int, int], num_blocks: int) -> None:
        """Workers of these layouts."""
        args = self.args
        config = TransferConfig(
            backend=BackendName(backend),
            staging_bytes=args.staging_mib * MIB,
            device_piece_bytes=args.piece_mib * MIB,
            nccl_ctas=args.nccl_ctas,
            staging_ctas=args.staging_ctas,
            copy_ctas=args.copy_ctas,
            connect_timeout_s=30,
        )
        self.num_blocks = num_blocks
        layouts = [_layout(layers, size, num_blocks) for size in tp]
        apart = len(args.prefill_gpus) + len(args.decode_gpus) > 2
        self.prefill.start("build", layouts[0], config, apart)
        self.decode.start("build", layouts[1], config, apart)
        self.refs = self.prefill.result(), self.decode.result()

    def handoffs(self, blocks: int, count: int) -> list[Handoff]:
        """New requests; each has its own destination blocks, scattered over the pool."""
        blocks_left = torch.randperm(self.num_blocks).tolist()
        result = []
        for index in range(count):
            key = RequestKey(f"r{next(self._numbers)}")
            own = tuple(blocks_left[index * blocks : (index + 1) * blocks])
            result.append(make_handoff(key, *self.refs, tuple(reversed(own)), own))
        return result

    def run(self, handoffs: Sequence[Handoff], window: int) -> list[tuple[float, float]]:
        """Run hand-offs; (push, commit on decode) of each in monotonic seconds."""
        self.prefill.do("expect", handoffs)
        self.decode.do("reserve", handoffs)
        sent = self.prefill.do("send", handoffs, window)
        commits = self.decode.do("commits", [handoff.key for handoff in handoffs])
        return [(start, end) for (start, _), end in zip(sent, commits, strict=True)]

    def check(self) -> None:
        """Random bits must arrive unchanged."""
        handoff = self.handoffs(_SEED_CHECK_BLOCKS, 1)[0]
        self.prefill.do("fill", handoff.source, 7)
        self.run([handoff], 1)
        wrong = self.decode.do("wrong_layers", handoff.dest, 7)
        if wrong:
            raise SystemExit(f"{wrong} layers differ after the transfer")

    def case(self, backend: str, layout: str, tp: tuple[int, int], tokens: int) -> Case:
        blocks = tokens // _BLOCK
        size = tokens * LAYERS[layout] * 2 * _HEADS * _HEAD_DIM * 2
        workers = zip(tp, (self.args.prefill_gpus, self.args.decode_gpus), strict=True)
        gpus = min(min(size, len(set(own))) for size, own in workers)
        raw = gpus * max(self.raw[backend].values())
        slots = self.num_blocks // blocks
        self.run(self.handoffs(blocks, 1), 1)
        alone = [self.run(self.handoffs(blocks, 1), 1)[0] for _ in range(self.args.repeats)]
        times = [end - start for start, end in alone]
        count = max(4, min(slots, 256))  # the first and the last run alone for a moment
        rates = []
        before = self.both("loop_seconds")
        for _ in range(self.args.repeats):
            moved = self.run(self.handoffs(blocks, count), self.args.window)
            span = max(end for _, end in moved) - min(start for start, _ in moved)
            rates.append(size * count / span / 1e9)
        after = self.both("loop_seconds")
        each = 1e3 / (self.args.repeats * count)
        rate = size / median(times) / 1e9
        return Case(
            backend=backend,
            layout=layout,
            ranks=f"TP{tp[0]}->TP{tp[1]}",
            tokens=tokens,
            mib=size / MIB,
            commit_ms=1e3 * median(times),
            commit_ms_worst=1e3 * max(times),
            alone=rate,
            alone_ratio=rate / raw,
            stream=median(rates),
            stream_ratio=median(rates) / raw,
            prefill_loop_ms=each * (after[0] - before[0]),
            decode_loop_ms=each * (after[1] - before[1]),
        )

    def ahead(self, backend: str, tokens: int, chunk: int) -> Ahead:
        """Layers are sent behind the step that computes them."""
        blocks = tokens // _BLOCK
        runs: list[tuple[float, float]] = []
        for index in range(2 + self.args.repeats):
            handoffs = self.handoffs(blocks, 1)
            self.prefill.do("expect", handoffs)
            self.decode.do("reserve", handoffs)
            (times,) = self.prefill.do("prompts", handoffs, chunk // _BLOCK)
            (commit,) = self.decode.do("commits", [handoffs[0].key])
            if index > 1:
                runs.append((times.end - times.start, commit - times.end))
        alone = [self.prefill.do("compute", tokens, chunk) for _ in range(1 + self.args.repeats)]
        prefill, late = median(run[0] for run in runs), median(run[1] for run in runs)
        return Ahead(
            backend=backend,
            tokens=tokens,
            chunk=chunk,
            prefill_alone_ms=1e3 * median(alone[1:]),
            prefill_ms=1e3 * prefill,
            commit_ms=1e3 * late,
            commit_ms_worst=1e3 * max(run[1] for run in runs),
            exposed=late / (prefill + late),
        )

    def disturbance(self, backend: str) -> dict[str, Any]:
        """Steps of 16 GB of weights on decode's GPU, without and with KV streaming in."""
        self.build(backend, LAYERS["8b"], (1, 1), 8192)
        self.check()
        self.decode.do("start_steps", 16 << 30)
        self.decode.do("step_times", 0.5)
        quiet = self.decode.do("step_times", 1.5)
        handoffs = self.handoffs(_SEED_CHECK_BLOCKS, 64)
        busy: list[float] = []
        moved = 0
        for _ in range(_BUSY_ROUNDS):
            self.prefill.do("expect", handoffs)
            self.decode.do("reserve", handoffs)
            self.prefill.start("send", handoffs, 4)
            begin = time.monotonic()
            busy += self.decode.do("step_times", 0.04)
            times = self.prefill.result()
            moved = int(len(handoffs) / (max(e for _, e in times) - begin))
            self.decode.do("commits", [handoff.key for handoff in handoffs])
            handoffs = self.handoffs(_SEED_CHECK_BLOCKS, 64)
        self.decode.do("stop_steps")
        result = {"backend": backend, "handoffs_per_s": moved}
        for name, steps in (("quiet", quiet), ("busy", busy)):
            result |= {f"{name}_{p}_ms": spent for p, spent in milliseconds(steps).items()}
            result[f"{name}_steps"] = len(steps)
        return result


def _layout(layers: int, tp: int, num_blocks: int) -> KVLayout:
    each = _HEADS // tp
    return KVLayout(
        num_layers=layers,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        block_size=_BLOCK,
        num_blocks=num_blocks,
        dtype="bfloat16",
        rank_heads=tuple((rank * each, (rank + 1) * each) for rank in range(tp)),
    )


def _rates(times: Sequence[float]) -> dict[int, float]:
    return {size: size / t / 1e9 for size, t in zip(_RAW_SIZES, times, strict=True)}


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, str, tuple[int, int], list[int]]]:
    for backend in args.backends:
        for layout in args.layouts:
            yield backend, layout, (1, 1), args.tokens
        for pair in args.reshard:
            tp = tuple(int(size) for size in pair.split("-"))
            yield backend, "8b", (tp[0], tp[1]), [2048, 8192]


def _print(case: Case) -> None:
    print(
        f"{case.backend:8} {case.layout:>3} {case.ranks} {case.tokens:>6} tokens"
        f"  commit {case.commit_ms:7.2f} ms (worst {case.commit_ms_worst:.2f})"
        f"  alone {case.alone:4.0f} GB/s {case.alone_ratio:.2f}"
        f"  stream {case.stream:4.0f} GB/s {case.stream_ratio:.2f}"
        f"  loop {case.prefill_loop_ms:.2f} + {case.decode_loop_ms:.2f} ms",
        flush=True,
    )


def _machine() -> dict[str, str]:
    gpus = facts.output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "gpus": gpus.replace("\n", "; "),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        **facts.facts(),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefill-gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--decode-gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--backends", nargs="+", default=["cuda_ipc", "nccl"])
    parser.add_argument("--layouts", nargs="*", default=["8b", "70b"], choices=sorted(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--reshard", nargs="*", default=["2-1", "1-2", "2-2", "4-1", "2-4"])
    parser.add_argument("--pool-gib", type=int, default=48)
    parser.add_argument("--no-steps", dest="steps", action="store_false")
    parser.add_argument("--no-ahead", dest="ahead", action="store_false")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2048)
    usual = TransferConfig()
    parser.add_argument("--staging-mib", type=int, default=usual.staging_bytes // MIB)
    parser.add_argument("--piece-mib", type=int, default=usual.device_piece_bytes // MIB)
    parser.add_argument("--nccl-ctas", type=int, default=usual.nccl_ctas)
    parser.add_argument("--staging-ctas", type=int, default=usual.staging_ctas)
    parser.add_argument("--copy-ctas", type=int, default=usual.copy_ctas)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the result with `--out`."""
    args = _parse()
    bench = Bench(args)
    cases: list[Case] = []
    ahead: list[Ahead] = []
    steps: list[dict[str, Any]] = []
    try:
        bench.measure_raw()
        for backend, layout, tp, lengths in _cases(args):
            longest = max(lengths) // _BLOCK
            block = _BLOCK * LAYERS[layout] * 2 * _HEADS * _HEAD_DIM * 2
            blocks = max(4 * longest, (args.pool_gib << 30) // block)
            bench.build(backend, LAYERS[layout], tp, blocks)
            bench.check()
            for tokens in lengths:
                cases.append(bench.case(backend, layout, tp, tokens))
                _print(cases[-1])
            if args.ahead and (layout, tp) == ("8b", (1, 1)):
                for tokens in (n for n in lengths if n <= _LONGEST_AHEAD):
                    ahead.append(bench.ahead(backend, tokens, args.chunk))
                    print(ahead[-1], flush=True)
        for backend in args.backends if args.steps else ():
            steps.append(bench.disturbance(backend))
            print(steps[-1], flush=True)
    finally:
        bench.close()
    if args.out is not None:
        raw = {
            kind: {f"{s // MIB} MiB": r for s, r in by.items()} for kind, by in bench.raw.items()
        }
        result = {
            "machine": _machine(),
            "raw_GB_per_s": raw,
            "cases": [asdict(case) for case in cases],
            "ahead_of_prefill": [asdict(each) for each in ahead],
            "decode_steps": steps,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
