"""Times of CPU engine steps by precision of the weights, interleaved, on one thread.

    python -m benchmarks.cpu_steps --model FOLDER [--formats none,int8,int4]

Processor time of the thread that runs the steps, so that others on the machine count little; the
best round of each. Decode steps have a context of 128 tokens.
"""

from __future__ import annotations

import argparse
import time

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cpu.runner import RankRunner
from engine.ranks.tensor_parallel import TensorParallel
from protocol.sampling import SamplingParams

_CONTEXT, _BLOCK, _BLOCKS = 128, 16, 600
_ROUNDS = 8
_GREEDY = SamplingParams(temperature=0.0)


def _runner(model: str, quantization: str | None) -> RankRunner:
    config = EngineConfig(
        model_path=model,
        quantization=quantization,
        num_threads=1,
        block_size=_BLOCK,
        num_blocks=_BLOCKS,
    )
    runner = RankRunner(config, TensorParallel())
    runner.open(_BLOCKS)
    return runner


def _decodes(count: int) -> StepBatch:
    width = _CONTEXT // _BLOCK + 1
    return StepBatch(
        sequences=tuple(
            SequenceStep(
                tokens=(100 + i,),
                start=_CONTEXT,
                block_tables=(tuple(range(i * width, (i + 1) * width)),),
                sampling=_GREEDY,
            )
            for i in range(count)
        )
    )


def _prompt(length: int) -> StepBatch:
    table = (tuple(range(length // _BLOCK)),)
    ids = tuple(range(100, 100 + length))
    step = SequenceStep(tokens=ids, start=0, block_tables=table, sampling=_GREEDY)
    return StepBatch(sequences=(step,))


def _seconds(runner: RankRunner, batch: StepBatch, repeats: int) -> float:
    began = time.thread_time()
    for _ in range(repeats):
        runner.submit(runner.prepare(batch)).wait()
    return (time.thread_time() - began) / repeats


def main() -> None:
    """Print a table with a row for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="none,int8,int4")
    options = parser.parse_args()
    names = options.formats.split(",")
    runners = {name: _runner(options.model, None if name == "none" else name) for name in names}
    steps = {f"{n} decode" + "s" * (n > 1): _decodes(n) for n in (1, 2, 4, 8, 16, 32)}
    steps["prompt of 512"] = _prompt(512)
    print("| ms | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(names))
    for label, batch in steps.items():
        repeats = max(1, 10 // batch.num_tokens)
        best = dict.fromkeys(names, float("inf"))
        for _ in range(_ROUNDS):
            for name, runner in runners.items():
                best[name] = min(best[name], _seconds(runner, batch, repeats))
        base = best[names[0]]
        cells = (f"{best[name] * 1e3:.2f} ({base / best[name]:.2f} x)" for name in names)
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
