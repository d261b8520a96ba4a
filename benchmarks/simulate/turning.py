"""A load that turns from long prompts to long outputs, on workers that keep their roles and on
workers whose roles follow it: `python -m benchmarks.simulate.turning`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.simulate.__main__ import figures, within
from benchmarks.simulate.devices import H200_8B, StepTime
from benchmarks.simulate.world import Setup, World
from cluster.bench.measure import Slo
from cluster.bench.workload import Ask
from cluster.scaling.needs import DecodeNeed, PrefillNeed, RouterSample, WorkerSample
from cluster.scaling.roles import RoleChange, RolePolicy
from engine.batch import StepBatch
from protocol.ids import Role
from router.config import RouterConfig
from worker_runtime.config import WorkerConfig

NUM_WORKERS = 4
_WORKER = WorkerConfig(max_num_seqs=256, max_num_batched_tokens=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Devices, what is promised on them, and the load: requests per second, mean prompt and output
    tokens before the turn and after it, each for `phase_s`."""

    step_time: StepTime
    promise: Slo
    phase_s: float
    before: tuple[float, int, int]
    after: tuple[float, int, int]

    def asks(self, *, seed: int = 1) -> list[Ask]:
        """Arrivals by chance; lengths from half to one and a half of the mean."""
        source, found = random.Random(seed), list[Ask]()
        for number, (rate, *means) in enumerate((self.before, self.after)):
            at = start = number * self.phase_s
            while (at := at + source.expovariate(rate)) < start + self.phase_s:
                prompt, output = (max(2, round(source.uniform(0.5, 1.5) * mean)) for mean in means)
                found.append(Ask(at=at, prompt_tokens=prompt, output_tokens=output))
        return found

    def setup(self, num_prefill: int) -> Setup:
        """So many prefill workers, the rest decode."""
        return Setup(
            step_time=self.step_time,
            num_prefill=num_prefill,
            num_decode=NUM_WORKERS - num_prefill,
            prefill=_WORKER,
            decode=replace(_WORKER, target_step_s=0.95 * self.promise.tpot),
            router=RouterConfig(model_path="m", local_gain_s=0.03),
        )

    def good(self, world: World) -> tuple[int, int]:
        """Requests within the promise that arrived before the turn, and after it."""
        kept = [r.ask.at >= self.phase_s for r in world.run() if within(figures(r), self.promise)]
        return len(kept) - sum(kept), sum(kept)


def small_device(batch: StepBatch) -> float:
    """A device for which a simulation has few steps to take: 5,000 prompt tokens a second, or 40
    sequences in 60 ms."""
    prompt = sum(len(step.tokens) for step in batch.sequences if len(step.tokens) > 1)
    return 0.02 + 2e-4 * prompt + 1e-3 * len(batch.sequences)


#: Llama-3.1-8B in bfloat16 on H200: 8 ms a token are promised on average.
H200 = Turn(
    step_time=H200_8B,
    promise=Slo(ttft=1.0, tpot=0.008),
    phase_s=60.0,
    before=(16.0, 8000, 40),
    after=(30.0, 300, 1000),
)
SMALL = Turn(
    step_time=small_device,
    promise=Slo(ttft=1.0, tpot=0.06),
    phase_s=60.0,
    before=(18.5, 800, 8),
    after=(16.0, 30, 100),
)


class Following:
    """The production decider, asked once a second as the directory does."""

    def __init__(self, turn: Turn) -> None:
        self.changes: list[tuple[float, RoleChange]] = []
        self._policy = RolePolicy(dict.fromkeys(Role, 1), cost_s=0.5)
        self._prefill = PrefillNeed(turn.promise.ttft / 2)
        self._decode = DecodeNeed(step_s=turn.promise.tpot, max_num_seqs=256, block_size=32)

    def __call__(self, world: World, arrived: int) -> None:
        """Look at the workers' loads and change a role if that is due."""
        now = world.clock.now
        samples = {
            role: [
                WorkerSample(worker_id=worker.ref.worker_id, age_s=60.0, load=worker.load_now())
                for worker in world.of(role)
            ]
            for role in Role
        }
        routers = RouterSample(arrived_tokens=arrived)
        prefills, decodes = samples[Role.PREFILL], samples[Role.DECODE]
        needs = {
            Role.PREFILL: self._prefill.take(prefills, decodes, routers, now),
            Role.DECODE: self._decode.take(decodes, routers),
        }
        change = self._policy.decide(samples, needs, now)
        if change is not None:
            self.changes.append((now, change))
            world.change_role(change.worker_id, change.role)


def show(name: str, halves: Iterable[int]) -> None:
    first, second = halves
    print(f"{name:24} {first:6} {second:6} {first + second:6}", flush=True)


def main() -> None:
    """Every static split, then roles that follow."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.turning")
    parser.add_argument("--small", action="store_true", help="a device with few, slow steps")
    turn = SMALL if parser.parse_args().small else H200
    load = turn.asks()
    print(
        f"{len(load)} requests, {NUM_WORKERS} workers: good before the turn, after it, and of all"
    )
    for num_prefill in range(1, NUM_WORKERS):
        name = f"{num_prefill} prefill, {NUM_WORKERS - num_prefill} decode"
        show(name, turn.good(World(turn.setup(num_prefill), load)))
    following = Following(turn)
    world = World(turn.setup(2), load, on_second=following)
    show("following, from 2 and 2", turn.good(world))
    for at, change in following.changes:
        print(f"  {at:5.0f} s: {change.worker_id} to {change.role}: {change.reason}")


if __name__ == "__main__":
    main()
