# ruff: noqa: SLF001 - it changes what an engine has chosen for itself
"""Launch shapes of the kernels of a decode step, chosen within the step on this card.

    python -m benchmarks.decode_shapes --model llama-3.1-70b --tp 4 --rows 1

A shape is judged by what it does to a whole step (a few layers and the head under a CUDA graph),
for kernels that begin before the one before them has ended cannot be timed alone. One product is
changed at a time; its best shape stays while the next one is tried. The best go into
engine.kernels.triton_linear, triton_split_linear and triton_attention.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.engine import GREEDY, Ranks
from benchmarks.gpu_limits import measure_limits, timed
from benchmarks.shape_candidates import (
    Key,
    attention_shapes,
    compile_all,
    keys_of,
    row_shapes,
    split_shapes,
)
from benchmarks.shapes import MODELS
from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cuda import split_decode
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner
from engine.cuda.weights import RandomSource
from engine.kernels import triton_attention, triton_linear, triton_split_linear
from engine.kernels.triton_linear import LinearShape
from engine.kernels.triton_split_linear import SplitShape
from engine.model.config import ModelConfig

_REPLAYS = 10


@dataclass(slots=True)
class Table:
    """The shapes in force: what is not in it is as the engine has it."""

    row: dict[Key, LinearShape]
    split: dict[Key, SplitShape]

    def install(self) -> None:
        """Have the engine ask here first."""
        row_rule, split_rule = triton_linear.default_shape, triton_split_linear.split_shape

        def row(n: int, k: int, gated: bool) -> LinearShape:
            return self.row.get((n, k, gated)) or row_rule(n, k, gated)

        def split(rows: int, n: int, k: int, gated: bool) -> SplitShape | None:
            return self.split.get((n, k, gated)) or split_rule(rows, n, k, gated)

        triton_linear.default_shape = row
        split_decode.split_shape = split  # type: ignore[attr-defined]


class Step:
    """A decode step of a few layers on this rank, timed as it is replayed."""

    def __init__(self, args: Any, ranks: Ranks, model: ModelConfig, device: torch.device) -> None:
        self.rows = args.rows
        config = EngineConfig(
            model_path="random", dtype="bfloat16", device=str(device), tp_size=ranks.size,
            num_blocks=args.rows * 64 + 64,
        )  # fmt: skip
        self.runner = CudaRunner(
            config, model, RandomSource(torch.bfloat16, device),
            CudaOptions(
                max_batch=args.rows, split_rows=128, graphs=False, max_chunk_tokens=64
            ),
            rank=ranks.rank,
        )  # fmt: skip
        split: Any = self.runner.model._split
        if split is not None and split.serves(args.rows):
            split._scratch = triton_split_linear.SplitScratch(device, 1 << 13, 1 << 23)
        self.runner.open(args.rows * 64 + 64)
        self.runner.start(ranks.join(device))
        for layer in self.runner.pool.layers:
            layer.normal_()
        sequences = tuple(
            SequenceStep(
                tokens=(17,), start=args.context,
                block_ids=tuple(range(64 * i, 64 * i + 64)), sampling=GREEDY,
            )
            for i in range(args.rows)
        )  # fmt: skip
        self.runner.run(StepBatch(sequences=sequences))
        torch.cuda.synchronize()

    def capture(self) -> torch.cuda.CUDAGraph:
        """The step under a graph, with the shapes in force."""
        runner, lane = self.runner, self.runner._lane
        with torch.inference_mode():
            with lane.active():
                runner._decode(self.rows, False)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=lane.stream):
                runner._decode(self.rows, False)
        return graph

    def seconds(self) -> float:
        """Median time of the step."""
        graph = self.capture()
        with self.runner._lane.active():
            for _ in range(3):
                graph.replay()
                spent = timed(lambda: _repeat(graph), 5) / _REPLAYS
        torch.cuda.synchronize()
        return spent


def _repeat(graph: torch.cuda.CUDAGraph) -> None:
    for _ in range(_REPLAYS):
        graph.replay()


class Search:
    """Tries candidates on all ranks alike; rank 0's clock decides."""

    def __init__(self, step: Step, ranks: Ranks) -> None:
        self._step = step
        self._ranks = ranks
        self._asked = 0
        self.figures: list[dict[str, Any]] = []

    def best(self, name: str, shapes: Sequence[Any], use: Callable[[Any], None]) -> None:
        """Use each shape in turn, then the best."""
        times = []
        for shape in shapes:
            use(shape)
            times.append(self._step.seconds())
        order = sorted(range(len(shapes)), key=lambda i: times[i])
        chosen = self._agree(order[0])
        use(shapes[chosen])
        if self._ranks.rank:
            return
        for i in order[:5] + order[-1:]:
            shown = asdict(shapes[i]) if hasattr(shapes[i], "__slots__") else shapes[i]
            self.figures.append({"what": name, "us": times[i] * 1e6, "shape": shown})
            print(f"  {name} {times[i] * 1e6:.1f} us {shown}", flush=True)

    def _agree(self, index: int) -> int:
        if self._ranks.size == 1:
            return index
        self._asked += 1
        key = f"choice/{self._asked}"
        if not self._ranks.rank:
            self._ranks.store.set(key, str(index))
        return int(self._ranks.store.get(key))


def search(args: Any, ranks: Ranks, step: Step, candidates: dict[str, list[Any]], keys: Any) -> Any:
    """All products, then attention, then how much is fetched early."""
    table = Table({}, {})
    table.install()
    finder = Search(step, ranks)
    finder.best("as it is", [None, None], lambda _: None)
    if "attention" in args.tune:
        place = (args.rows, False)
        now = step.runner._cuts[place]
        step.runner._scratch = triton_attention.DecodeScratch(
            args.rows, args.rows * 64, step.runner._shape.num_heads,
            step.runner._shape.head_dim, step.runner.device,
        )  # fmt: skip
        finder.best("attention", [now, *attention_shapes(now)],
                    lambda shape: step.runner._cuts.__setitem__(place, shape))  # fmt: skip
    chosen: dict[Key, Any] = table.row if args.rows == 1 else table.split
    for name, shapes in candidates.items():
        key = keys[name]

        def use(shape: Any, key: Key = key) -> None:
            if shape is None:
                chosen.pop(key, None)
            else:
                chosen[key] = shape

        finder.best(name, [None, *shapes], use)
    tune_prefetch(args, finder)
    return finder.figures


def tune_prefetch(args: Any, finder: Search) -> None:
    """Columns of the weights that the products of many rows ask for early."""

    def use(columns: int) -> None:
        triton_split_linear._PREFETCH_COLUMNS = columns

    if args.rows > 1:
        finder.best("prefetch", [256, 128, 512, 0], use)


def timeline(step: Step, layers: int) -> list[dict[str, Any]]:
    """Mean begin and end of each kernel of a layer, from the layer's first, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    graph = step.capture()
    with step.runner._lane.active():
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace, step.runner._lane.active():
        for _ in range(6):
            graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if str(event.device_type).endswith("CUDA")
    )
    at = [i for i, span in enumerate(spans) if "decode" in span[2] and "paged" in span[2]]
    if len(at) < layers:
        return []
    width = at[2] - at[1]
    rows: list[dict[str, Any]] = []
    whole = [i for i in at if i + width < len(spans) and spans[i + width][2] == spans[i][2]]
    for offset in range(width + 1):
        picked = [(spans[i], spans[i + offset]) for i in whole]
        rows.append({
            "kernel": picked[0][1][2][:40],
            "begins": sum(b[0] - a[0] for a, b in picked) / len(picked),
            "ends": sum(b[1] - a[0] for a, b in picked) / len(picked),
        })  # fmt: skip
    for row in rows:
        print(f"    {row['kernel']:42} {row['begins']:8.1f} {row['ends']:8.1f}", flush=True)
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=560)
    parser.add_argument("--tune", default="gate+up,down,qkv,out,attention")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, ranks: Ranks, candidates: dict[str, list[Any]]) -> None:
    """Search as one rank."""
    device = torch.device("cuda", ranks.rank)
    torch.cuda.set_device(device)
    torch.manual_seed(7)
    model = replace(ModelConfig.from_dict(MODELS[args.model]), num_layers=args.layers)
    keys = keys_of(model, ranks.size)
    copy = measure_limits(device).copy
    with torch.inference_mode():
        step = Step(args, ranks, model, device)
    weights = step.runner.weights
    layer = weights.layers[0]
    each = sum(w.nbytes for w in (layer.qkv, layer.out, layer.gate_up, layer.down))
    kv = args.rows * args.context * step.runner.pool.data[:, 0].nbytes
    total = each * args.layers + weights.head.nbytes + kv // step.runner.pool.block_size
    if not ranks.rank:
        print(
            f"{args.model} tp {args.tp} rows {args.rows}: {args.layers} layers, "
            f"bytes at copy rate {total / copy * 1e6:.1f} us, copy {copy / 1e12:.2f} TB/s"
        )
        before = timeline(step, args.layers)
    elif args.layers:
        graph = step.capture()
        with step.runner._lane.active():
            for _ in range(7):
                graph.replay()
        torch.cuda.synchronize()
        before = []
    figures = search(args, ranks, step, candidates, keys)
    if args.out and not ranks.rank:
        report = {
            "card": f"{ranks.size} x {torch.cuda.get_device_name(device)}",
            "command": " ".join(("python -m benchmarks.decode_shapes", *sys.argv[1:])),
            "copy_tb_s": copy / 1e12, "floor_us": total / copy * 1e6,
            "timeline_before": before, "figures": figures,
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Compile, start the other ranks, search."""
    argv = sys.argv[1:]
    args = parse(argv)
    keys = keys_of(ModelConfig.from_dict(MODELS[args.model]), args.tp)
    candidates = {
        name: row_shapes(key[2]) if args.rows == 1 else split_shapes(args.rows, key)
        for name, key in keys.items()
        if name in args.tune.split(",")
    }
    lead = args.rank == 0
    if lead:
        compile_all(candidates, keys, args)
        if args.compile_only:
            return
    if args.tp == 1:
        run(args, Ranks(rank=0, size=1, store=None), candidates)
        return
    store = TCPStore("127.0.0.1", args.port, args.tp, is_master=lead, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.decode_shapes", *argv, "--port", str(store.port)]
    others = range(1, args.tp) if lead else ()
    processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in others]
    try:
        run(args, Ranks(rank=args.rank, size=args.tp, store=store), candidates)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
