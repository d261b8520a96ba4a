"""The rows that decisions about goodput are compared by: three traces at fifteen speeds, one
prefill and one decode worker, delays and noise as two H200 showed them (decision 91).

    python -m benchmarks.simulate.rows --traces FOLDER --seeds 1,2,3,4 --set FIELD=VALUE
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from pathlib import Path

from benchmarks.simulate.__main__ import figures, slo_of, within
from benchmarks.simulate.devices import H200_8B_STACK
from benchmarks.simulate.worker import Delays
from benchmarks.simulate.world import Setup, World
from cluster.bench.workload import fit_trace, read_trace
from cluster.config.load import load_config
from engine.batch import StepBatch

_SLOS = ("200/20", "200/20/20", "200/20/12", "500/20", "200/10")
_DELAYS = Delays(
    message_s=1.3e-3,
    place_s=2.5e-3,
    place_token_s=4e-7,
    commit_s=2e-3,
    commit_token_s=6e-7,
    commit_spread=(0.75, 1.3),
)
#: Steps take so much more or less, and one in 500 of them is seen late.
_SPREAD, _LATE_SHARE, _LATE_S = 0.03, 0.002, (2e-3, 6e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Consecutive requests of a trace at one speed."""

    name: str
    file: str
    first: int
    limit: int
    speed: float


ROWS = tuple(
    Row(name=name, file=file, first=first, limit=limit, speed=speed)
    for name, file, first, limit, speeds in (
        ("conv", "azure2023_conv.csv", 10585, 300, (1, 2, 2.5, 3, 3.5, 4)),
        ("other", "azure2023_conv.csv", 8000, 300, (2, 3, 4)),
        ("code", "azure2023_code.csv", 2126, 300, (0.25, 0.35, 0.5, 0.75)),
        ("r1", "servegen_r1_sampled.csv", 2788, 120, (0.5, 1)),
    )
    for speed in speeds
)


@dataclass(slots=True)
class NoisySteps:
    """Steps of the stack, with noise."""

    seed: int
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __call__(self, batch: StepBatch) -> float:
        seconds = H200_8B_STACK(batch) * self.random.lognormvariate(0.0, _SPREAD)
        late = self.random.random() < _LATE_SHARE
        return seconds + (self.random.uniform(*_LATE_S) if late else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a row."""

    row: Row
    seed: int
    traces: Path
    config: Path
    overrides: tuple[str, ...]


def run(job: Job) -> list[int]:
    """Good requests within each promise."""
    config = load_config(job.config, overrides=list(job.overrides)).config
    setup = Setup(
        step_time=NoisySteps(job.seed),
        prefill=config.prefill.worker,
        decode=config.decode.worker,
        router=config.router.settings,
        step_rows=H200_8B_STACK.step_rows,
        delays=_DELAYS,
        seed=job.seed,
    )
    row = job.row
    asks = fit_trace(
        read_trace(job.traces / row.file)[row.first :],
        limit=row.limit,
        speed=row.speed,
        max_prompt=6000,
        max_output=1 << 20,
    )
    seen = [figures(request) for request in World(setup, asks).run()]
    return [sum(within(each, slo_of(slo)) for each in seen) for slo in _SLOS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the mean of the runs of each row, and their sum."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.rows")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path("deploy/configs/gpu-1p1d.yaml"))
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--seeds", default="1,2")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = [
        Job(
            row=row,
            seed=seed,
            traces=options.traces,
            config=options.config,
            overrides=tuple(options.overrides),
        )
        for row in ROWS
        for seed in seeds
    ]
    with Pool() as pool:
        found = pool.map(run, jobs, chunksize=1)
    print("mean of good requests at", *_SLOS, sep="  ")
    total = [0.0] * len(_SLOS)
    for number, row in enumerate(ROWS):
        runs = found[number * len(seeds) : (number + 1) * len(seeds)]
        means = [sum(column) / len(seeds) for column in zip(*runs, strict=True)]
        total = [before + mean for before, mean in zip(total, means, strict=True)]
        print(f"{row.name} x{row.speed:g}", *(f"{mean:.1f}" for mean in means), sep="  ")
    print("all", *(f"{mean:.1f}" for mean in total), sep="  ")


if __name__ == "__main__":
    main()
