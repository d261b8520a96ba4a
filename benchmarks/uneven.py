"""Steps of one engine whose decode rows have contexts as different as a trace's.

    python -m benchmarks.uneven --window 'conv azure2023_conv.csv 10585 16,48,96' --chunks 0,64,256

Rows are consecutive requests of the trace in the middle of their outputs; the chunk follows on
1,024 tokens. Options of the engine are those of `benchmarks.engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import torch
from msgspec.structs import replace

from benchmarks.engine import GREEDY, Bench, build
from benchmarks.engine_options import engine_parser
from benchmarks.gpu_limits import begin_report
from benchmarks.ranks import Ranks
from benchmarks.shapes import Tables, block_tables
from cluster.bench.workload import fit_trace, read_trace
from engine.batch import SequenceStep, StepBatch

_HISTORY = 1024


def contexts_of(trace: Path, first: int, rows: int) -> list[int]:
    """Tokens of the contexts of so many requests from number `first` on, prompts of up to 6,000."""
    asks = fit_trace(
        read_trace(trace)[first:], limit=rows, speed=1, max_prompt=6000, max_output=1 << 20
    )
    return [ask.prompt_tokens + ask.output_tokens // 2 for ask in asks]


def uneven_tables(bench: Bench, lengths: Sequence[int]) -> list[Tables]:
    """Block tables of sequences of so many tokens, none of whose blocks is in two."""
    size = bench.runner.layout.block_size
    ends = [0, *accumulate(-(-length // size) for length in lengths)]
    (whole,) = bench.tables(1, ends[-1] * size)
    return [tuple(table[a:b] for table in whole) for a, b in pairwise(ends)]


def measure(bench: Bench, name: str, contexts: Sequence[int], count: int, steps: int) -> None:
    """Pipelined steps of these decode rows beside a chunk of `count` tokens, or none."""
    layout = bench.runner.layout
    *tables, last = uneven_tables(bench, [*(n + steps + 8 for n in contexts), _HISTORY + count])
    chunk = SequenceStep(
        tokens=tuple(7 * i % 4000 for i in range(count)),
        start=_HISTORY,
        block_tables=block_tables(last, layout, _HISTORY),
        sampling=GREEDY,
    )

    def batch(step: int) -> StepBatch:
        rows = []
        for number, (own, context) in enumerate(zip(tables, contexts, strict=True)):
            (row,) = bench.decode_rows([own], context, step)
            rows.append(replace(row, previous=number if step else None))
        return StepBatch(sequences=(*rows, *([chunk] if count else [])))

    times = bench.pipelined([batch(step) for step in range(steps + 6)])
    gaps = sorted(b[0] - a[0] for a, b in pairwise(times[4:]))
    bench.report.add(
        f"{name}: {len(contexts)} decode rows, chunk of {count}",
        ms=median(gaps) * 1e3,
        p90_ms=gaps[len(gaps) * 9 // 10] * 1e3,
        context_tokens=sum(contexts),
        longest=max(contexts),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every number of rows of every window beside every chunk."""
    argv = sys.argv[1:] if argv is None else argv
    parser = engine_parser(__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--chunks", default="0,64,256")
    parser.add_argument(
        "--window", action="append", required=True, metavar="'NAME FILE FIRST ROWS'"
    )
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    report = begin_report("uneven", argv, args, device)
    bench = Bench(build(args, device, Ranks(rank=0, size=1, store=None), None, report), report)
    for window in args.window:
        name, trace, first, rows = window.split()
        for size in map(int, rows.split(",")):
            contexts = contexts_of(Path(trace), int(first), size)
            for count in map(int, args.chunks.split(",")):
                measure(bench, name, contexts, count, args.steps)
    report.write(args.out)
    bench.runner.close()


if __name__ == "__main__":
    main()
