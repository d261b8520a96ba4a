"""Two pools under a changing load on a virtual clock, coarse enough for hours: the production
scaling policy decides their sizes.

`python -m benchmarks.simulate.fleet [--trace FILE]` compares it with pools that always have all the
workers they may have, which no foreknowledge of the load could beat.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench.workload import Ask, read_trace
from cluster.scaling.needs import DecodeNeed, PrefillNeed, RouterSample, WorkerSample
from cluster.scaling.policy import PoolLimits, PoolSample, ScalingPolicy, victims
from protocol.ids import Role
from protocol.messages import WorkerLoad

_TICK_S = 0.05
_DECIDE_S = 1.0
#: Prompts that a prefill worker is given ahead (router.settings.dispatch_window_s).
_AHEAD_S = 2.0
_BLOCK = 16

#: Requests per second at a time between 0 and 1 of the whole.
SHAPES: dict[str, Callable[[float], float]] = {
    "step": lambda x: 2.0 if x < 0.25 else 14.0 if x < 0.75 else 4.0,
    "ramp": lambda x: 1.0 + 20.0 * (1 - abs(2 * x - 1)),
    "burst": lambda x: 24.0 if (12 * x) % 1 > 0.7 else 1.0,
    "diurnal": lambda x: 11.0 - 10.0 * math.cos(2 * math.pi * x),
    "steady": lambda _: 5.5,  # a little more than one prefill worker computes
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A worker of either pool, about a 70B model on four GPUs. start_s: from the decision to the
    first request."""

    prompt_tokens_per_s: float = 6000.0
    step_s: float = 0.012
    row_s: float = 0.00025
    num_blocks: int = 8000
    max_num_seqs: int = 128
    start_s: float = 30.0


@dataclass(slots=True)
class Flight:
    """One request. ready: when it arrived; first, last: its first and last token."""

    ask: Ask
    left: float = 0.0
    first: float = math.inf
    last: float = math.inf

    def good(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether both promises were kept."""
        tokens = max(1, self.ask.output_tokens - 1)
        return self.first - self.ask.at <= ttft_s and (self.last - self.first) / tokens <= tpot_s


@dataclass(slots=True)
class Worker:
    """A worker from its launch on. ready: when it takes requests."""

    name: str
    ready: float
    draining: bool = False
    queue: deque[tuple[Flight, Worker]] = field(default_factory=deque)
    tokens: float = 0.0
    running: list[Flight] = field(default_factory=list)
    blocks: int = 0
    rate: float = 0.0
    step_s: float = 0.0


class Fleet:
    """Runs requests through both pools. sizes: those at the start."""

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        machine: Machine,
        sizes: dict[Role, int],
        policy: ScalingPolicy | None,
        ttft_s: float,
        queue: bool = False,
    ) -> None:
        """queue: requests that would be late wait instead of being refused."""
        self.flights = [Flight(ask) for ask in asks]
        self.changes: list[tuple[float, Role, int]] = []
        self.worker_s = dict.fromkeys(Role, 0.0)
        self._machine, self._policy, self._ttft_s = machine, policy, ttft_s
        self._waits = queue
        self._pools: dict[Role, list[Worker]] = {
            role: [Worker(f"{role}-{i}", ready=-60.0) for i in range(sizes[role])] for role in Role
        }
        self._wanted = dict(sizes)
        self._queue: deque[Flight] = deque()
        self._arrived = 0
        self._launched = 100

    def run(self) -> None:
        """Until every request has ended."""
        arrivals, now, decided = deque(self.flights), 0.0, 0.0
        end = arrivals[-1].ask.at
        while arrivals or self._queue or any(w.queue or w.running for w in self._all()):
            while arrivals and arrivals[0].ask.at <= now:
                self._arrive(arrivals.popleft(), now)
            self._dispatch(now)
            self._prefill(now)
            self._decode(now)
            for role, workers in self._pools.items():
                self._pools[role] = [w for w in workers if not _gone(w)]
                self.worker_s[role] += _TICK_S * len(workers) * (now < end)
            if self._policy is not None and now >= decided:
                decided = now + _DECIDE_S
                self._scale(self._policy, now)
            now += _TICK_S

    def _all(self) -> Iterator[Worker]:
        for workers in self._pools.values():
            yield from workers

    def _ready(self, role: Role, now: float) -> list[Worker]:
        return [w for w in self._pools[role] if w.ready <= now and not w.draining]

    def _arrive(self, flight: Flight, now: float) -> None:
        self._arrived += flight.ask.prompt_tokens
        rate = self._machine.prompt_tokens_per_s * max(1, len(self._ready(Role.PREFILL, now)))
        waiting = sum(w.tokens for w in self._pools[Role.PREFILL])
        waiting += sum(other.ask.prompt_tokens for other in self._queue)
        if self._waits or waiting / rate <= self._ttft_s:
            self._queue.append(flight)

    def _dispatch(self, now: float) -> None:
        while self._queue:
            flight = self._queue[0]
            prefill = min(self._ready(Role.PREFILL, now), key=lambda w: w.tokens, default=None)
            if prefill is None or prefill.tokens > _AHEAD_S * self._machine.prompt_tokens_per_s:
                return
            blocks = _blocks(flight.ask)
            fitting = [
                w
                for w in self._ready(Role.DECODE, now)
                if w.blocks + blocks <= self._machine.num_blocks
                and len(w.running) < self._machine.max_num_seqs
            ]
            if not fitting:
                return
            decode = min(fitting, key=lambda w: len(w.running))
            decode.blocks += blocks
            prefill.queue.append((self._queue.popleft(), decode))
            flight.left = flight.ask.prompt_tokens
            prefill.tokens += flight.left

    def _prefill(self, now: float) -> None:
        for worker in self._pools[Role.PREFILL]:
            budget = self._machine.prompt_tokens_per_s * _TICK_S
            if worker.queue:
                worker.rate = self._machine.prompt_tokens_per_s
            while worker.queue and budget > 0:
                flight, decode = worker.queue[0]
                used = min(budget, flight.left)
                budget, flight.left, worker.tokens = (
                    budget - used,
                    flight.left - used,
                    worker.tokens - used,
                )
                if flight.left <= 0:
                    worker.queue.popleft()
                    flight.first, flight.left = now, flight.ask.output_tokens - 1
                    decode.running.append(flight)

    def _decode(self, now: float) -> None:
        for worker in self._pools[Role.DECODE]:
            step_s = self._machine.step_s + self._machine.row_s * len(worker.running)
            worker.step_s = min(worker.step_s or step_s, step_s) if not worker.running else step_s
            for flight in worker.running:
                flight.left -= _TICK_S / step_s
                if flight.left <= 0:
                    flight.last = now
                    worker.blocks -= _blocks(flight.ask)
            worker.running = [flight for flight in worker.running if flight.left > 0]

    def _scale(self, policy: ScalingPolicy, now: float) -> None:
        samples = {
            role: PoolSample(
                wanted=self._wanted[role],
                ready=tuple(self._sample(role, w, now) for w in self._ready(role, now)),
            )
            for role in Role
        }
        blocked = (
            bool(self._queue)
            and min((w.tokens for w in self._ready(Role.PREFILL, now)), default=math.inf)
            < _AHEAD_S * self._machine.prompt_tokens_per_s
        )
        waiting = sum(flight.ask.prompt_tokens for flight in self._queue)
        routers = RouterSample(
            waiting_tokens=0 if blocked else waiting,
            blocked_tokens=waiting if blocked else 0,
            arrived_tokens=self._arrived,
        )
        self._arrived = 0
        for role, decision in policy.decide(samples, routers, now).items():
            change = decision.replicas - self._wanted[role]
            if not change:
                continue
            self.changes.append((now, role, decision.replicas))
            self._wanted[role] = decision.replicas
            for _ in range(change):
                self._launched += 1
                name = f"{role}-{self._launched}"
                self._pools[role].append(Worker(name, ready=now + self._machine.start_s))
            names = {w.worker_id for w in victims(samples[role].ready, -change)}
            for worker in self._pools[role]:
                worker.draining |= worker.name in names

    def _sample(self, role: Role, worker: Worker, now: float) -> WorkerSample:
        prefills = role is Role.PREFILL
        load = WorkerLoad(
            running=len(worker.running),
            waiting=len(worker.queue),
            waiting_tokens=int(worker.tokens),
            free_blocks=self._machine.num_blocks - worker.blocks,
            held_blocks=worker.blocks,
            total_blocks=self._machine.num_blocks,
            tokens_per_second=worker.rate if prefills else 0.0,
            decode_step_s=0.0 if prefills else worker.step_s,
        )
        return WorkerSample(worker_id=worker.name, age_s=now - worker.ready, load=load)


def _gone(worker: Worker) -> bool:
    return worker.draining and not worker.queue and not worker.running and not worker.blocks


def _blocks(ask: Ask) -> int:
    return -(-(ask.prompt_tokens + ask.output_tokens) // _BLOCK)


def arrivals(shape: str, lengths: Sequence[Ask], *, hours: float = 1.0, seed: int = 0) -> list[Ask]:
    """Poisson arrivals at the rate of a shape, with lengths drawn from `lengths`."""
    source, now, asks, end = random.Random(seed), 0.0, [], 3600 * hours
    rate = SHAPES[shape]
    most = max(rate(i / 1000) for i in range(1000))
    while (now := now + source.expovariate(most)) < end:
        if source.random() * most < rate(now / end):
            drawn = source.choice(lengths)
            asks.append(
                Ask(at=now, prompt_tokens=drawn.prompt_tokens, output_tokens=drawn.output_tokens)
            )
    return asks


def drawn_lengths(count: int = 2000, seed: int = 0) -> list[Ask]:
    """Lengths like those of the Azure 2023 conversation trace: medians 1,020 in and 129 out."""
    source = random.Random(seed)
    return [
        Ask(
            prompt_tokens=min(4000, max(16, round(source.lognormvariate(6.7, 0.9)))),
            output_tokens=min(800, max(2, round(source.lognormvariate(4.9, 0.8)))),
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Shares of requests that keep their promises, scaled and with all workers; worker hours of
    both pools of all that were allowed; changes of size."""

    good: float
    best: float
    share_of_workers: float
    changes: int


def compare(
    asks: Sequence[Ask],
    *,
    machine: Machine,
    max_replicas: int,
    gpus: float | None = None,
    ttft_s: float = 2.0,
    tpot_s: float = 0.05,
) -> Comparison:
    """Run the load twice: with the policy from the minimum, and with all workers."""
    limits = {
        role: PoolLimits(min_replicas=1, max_replicas=max_replicas, gpus=1.0) for role in Role
    }
    policy = ScalingPolicy(
        limits,
        prefill=PrefillNeed(ttft_s / 2),
        decode=DecodeNeed(step_s=tpot_s, max_num_seqs=machine.max_num_seqs, block_size=_BLOCK),
        keep_s=60.0,
        gpus=gpus,
    )
    runs = {}
    for name, chosen, size in (("scaled", policy, 1), ("all", None, max_replicas)):
        runs[name] = fleet = Fleet(
            asks, machine=machine, sizes=dict.fromkeys(Role, size), policy=chosen, ttft_s=ttft_s
        )
        fleet.run()
    good = {name: sum(f.good(ttft_s, tpot_s) for f in run.flights) for name, run in runs.items()}
    used = {name: sum(run.worker_s.values()) for name, run in runs.items()}
    return Comparison(
        good=good["scaled"] / len(asks),
        best=good["all"] / len(asks),
        share_of_workers=used["scaled"] / used["all"],
        changes=len(runs["scaled"].changes),
    )


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.fleet")
    parser.add_argument("--trace", type=Path, help="take lengths from this trace")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--start", type=float, default=30.0, help="seconds to start a worker")
    parser.add_argument("--max-replicas", type=int, default=8)
    parser.add_argument("--gpus", type=float)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    lengths = drawn_lengths() if options.trace is None else read_trace(options.trace)
    print("shape    requests  good  with all  of it  workers  changes")
    for shape in options.shapes.split(","):
        asks = arrivals(shape, lengths, hours=options.hours)
        found = compare(
            asks,
            machine=Machine(start_s=options.start),
            max_replicas=options.max_replicas,
            gpus=options.gpus,
        )
        print(
            f"{shape:8} {len(asks):8d} {found.good:6.1%} {found.best:8.1%} "
            f"{found.good / found.best:7.1%} {found.share_of_workers:7.1%} {found.changes:7d}"
        )


if __name__ == "__main__":
    main()
