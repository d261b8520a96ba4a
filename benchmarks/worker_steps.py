"""The workers' step loops on one GPU against the bare engine in the same process.

    python -m benchmarks.worker_steps --out benchmarks/results/engine/worker-steps-h200.json

Scheduler, driver, step thread and event streams are a worker's own; only the hand-off and the
network are missing: grants are answered at once, batches of events are encoded and thrown away. The
bare engine gets steps that were built before. Weights are random, the KV pool holds random values.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.engine import Bench, build
from benchmarks.engine_options import engine_parser
from benchmarks.gpu_limits import begin_report, report_trace
from benchmarks.ranks import Ranks
from cluster.bench.measure import milliseconds
from decode_worker.scheduler import DecodeScheduler
from engine.batch import StepBatch, StepResult
from engine.cuda.runner import CudaRunner
from engine.executor import Executor, PendingStep
from engine.kv.allocator import BlockAllocator
from kv_transfer.control.listeners import TransferReport
from observability.clock import steady_clock
from prefill_worker.scheduler import PrefillScheduler
from protocol import codec
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVFingerprint
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.states import WorkerState
from worker_runtime.config import WorkerConfig
from worker_runtime.control.event_publisher import EventPublisher
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.messages import (
    CommitHandoff,
    Committed,
    Delivered,
    Granted,
    Snapshot,
    StepOutput,
    Submitted,
)
from worker_runtime.step_loop import Inbox, StepLoop

SCHEDULERS = {Role.PREFILL: PrefillScheduler, Role.DECODE: DecodeScheduler}
PEER = WorkerRef(worker_id="peer", epoch=1, role=Role.PREFILL, address="127.0.0.1:1")
ROUTER = "router"
FINGERPRINT = KVFingerprint(
    model="random",
    weights="random",
    num_layers=0,
    num_kv_heads=0,
    head_dim=0,
    dtype="bfloat16",
    rope="",
)


class TimedExecutor(Executor):
    """Notes when each step had landed, and how many tokens it ran."""

    def __init__(self, runner: CudaRunner, depth: int) -> None:
        super().__init__(runner, FINGERPRINT)
        self.depth = depth
        self.landed: list[tuple[float, int]] = []

    def launch(self, batch: StepBatch) -> PendingStep:
        return _Timed(super().launch(batch), batch.num_tokens, self.landed)


class _Timed:
    def __init__(self, step: PendingStep, tokens: int, landed: list[tuple[float, int]]) -> None:
        self._step, self._tokens, self._landed = step, tokens, landed
        self.number = step.number

    @property
    def is_over(self) -> bool:
        return self._step.is_over

    def wait(self) -> StepResult:
        result = self._step.wait()
        self._landed.append((time.perf_counter(), self._tokens))
        return result


class Worker:
    """Everything of a worker from inbox to encoded events, around one engine. Runs on an event
    loop; `on_output` takes each turn's output there."""

    def __init__(
        self,
        runner: CudaRunner,
        role: Role,
        on_output: Callable[[Any], None],
        depth: int,
    ) -> None:
        layout = runner.layout
        self.inbox: Inbox[Any] = Inbox()
        self.executor = TimedExecutor(runner, depth)
        self.idle = asyncio.Event()
        self._snapshot = Snapshot()
        self._on_output = on_output
        self._publisher = EventPublisher(
            epoch=1,
            heartbeat_s=0.5,
            report=lambda: (WorkerState.READY, role, self._snapshot.load),
            on_gone=lambda _: None,
        )
        blocks = BlockAllocator(layout.num_blocks, layout.block_size, layout.groups)
        schedulers: dict[Role, Any] = {
            each: scheduler(
                config=WorkerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
                blocks=blocks,
                fingerprint=FINGERPRINT,
                place="worker",
            )
            for each, scheduler in SCHEDULERS.items()
        }
        loop = asyncio.get_running_loop()
        self._loop = StepLoop(
            name="steps",
            scheduler=BothRoles(schedulers, blocks, role),
            deliver=lambda *turn: loop.call_soon_threadsafe(self._deliver, *turn),
            executor=self.executor,
            inbox=self.inbox,
            clock=steady_clock(),
        )
        self._reader = asyncio.create_task(self._read())

    def start(self) -> None:
        """Start the step thread."""
        self._loop.start()

    async def stop(self) -> None:
        """End everything but the engine."""
        await asyncio.to_thread(self._loop.stop)
        self._publisher.close()
        await self._reader
        if self._loop.broken is not None:
            raise self._loop.broken

    async def _read(self) -> None:
        async for batch in self._publisher.stream(ROUTER):
            codec.encode(batch)

    def _deliver(self, out: Any, snapshot: Snapshot, _accepted: int) -> None:
        self._snapshot = snapshot
        self._publisher.publish(out.events)
        self._on_output(out)
        if snapshot.num_unfinished == 0 or self._loop.broken is not None:
            self.idle.set()


def submit(index: int, prompt: int, sampling: SamplingParams) -> Submit:
    """A request of `prompt` tokens whose other half is elsewhere."""
    return Submit(
        key=RequestKey(f"request-{index}"),
        router_id=ROUTER,
        prompt_ids=tuple((7 * i + index) % 4000 for i in range(prompt)),
        sampling=sampling,
        time_left_s=3600.0,
        peer=PEER,
    )


async def decode_steps(
    runner: CudaRunner, batch: int, context: int, steps: int, depth: int
) -> list[float]:
    """Seconds between the landings of whole decode steps of a decode worker."""
    reserved: list[RequestKey] = []

    def on_output(out: StepOutput) -> None:
        reserved.extend(reserve.key for reserve in out.reserves)
        if out.reserves and len(reserved) == batch:
            for key in reserved:
                worker.inbox.put(Committed(key=key, tokens=(17,)))

    worker = Worker(runner, Role.DECODE, on_output, depth)
    for i in range(batch):
        sampling = SamplingParams(seed=i, max_tokens=steps + 1, ignore_eos=True)
        worker.inbox.put(Submitted(submit=submit(i, context, sampling)))
    worker.start()
    await worker.idle.wait()
    await worker.stop()
    marks = [when for when, tokens in worker.executor.landed if tokens == batch]
    return [b - a for a, b in pairwise(marks[6:])]


async def prefill_rate(runner: CudaRunner, count: int, length: int, depth: int) -> float:
    """Prompt tokens a second of a prefill worker whose peer takes blocks at once."""
    report = TransferReport(num_bytes=0, num_pieces=0, start=0.0, end=0.0)

    def on_output(out: StepOutput) -> None:
        for order in out.sends:
            if isinstance(order, CommitHandoff):
                worker.inbox.put(Delivered(key=order.key, report=report))

    worker = Worker(runner, Role.PREFILL, on_output, depth)
    for i in range(count):
        request = submit(i, length, SamplingParams(temperature=0.0, ignore_eos=True))
        worker.inbox.put(Submitted(submit=request, role=Role.PREFILL))
        worker.inbox.put(Granted(key=request.key, num_cached_tokens=0, num_tokens=length))
    worker.start()
    await worker.idle.wait()
    await worker.stop()
    (first, _), *rest = worker.executor.landed
    return sum(tokens for _, tokens in rest) / (rest[-1][0] - first)


def measure(bench: Bench, args: argparse.Namespace) -> None:
    """Each shape on the bare engine, then behind the loop: one step at a time, and one ahead."""
    report = bench.report
    for batch in map(int, args.batches.split(",")):
        bare = bench.decode(batch, args.context, args.steps, SamplingParams(seed=3))
        figures: dict[str, float] = {}
        for depth in (1, 2):
            steps = decode_steps(bench.runner, batch, args.context, args.steps, depth)
            spent = milliseconds(asyncio.run(steps))
            figures |= {f"depth{depth}_ms": spent["p50"], f"depth{depth}_p99_ms": spent["p99"]}
        report.add(
            f"decode worker, batch {batch}, context {args.context}",
            engine_ms=bare * 1e3,
            **figures,
            over_engine=figures["depth2_ms"] / (bare * 1e3) - 1.0,
        )
    for count, length in ((32, 2048), (512, 128)):
        bench.prefill(count, length, 1)
        rates = [asyncio.run(prefill_rate(bench.runner, count, length, depth)) for depth in (1, 2)]
        report.add(
            f"prefill worker, {count} x {length}",
            depth1_tokens_per_s=rates[0],
            depth2_tokens_per_s=rates[1],
        )


def profile_worker(bench: Bench, batch: int, args: argparse.Namespace) -> None:
    """How long the device idles between the steps of a decode worker."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        asyncio.run(decode_steps(bench.runner, batch, args.context, 24, 2))
        torch.cuda.synchronize()
    report_trace(bench.report, f"decode worker, batch {batch}", trace.events(), num_kernels=0)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = engine_parser(__doc__)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--context", type=int, default=608)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--switch-ms", type=float, help="sys.setswitchinterval, Python's own is 5")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.switch_ms is not None:
        sys.setswitchinterval(args.switch_ms * 1e-3)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    report = begin_report("worker_steps", argv, args, device)
    runner = build(args, device, Ranks(rank=0, size=1, store=None), None, report)
    bench = Bench(runner, report)
    measure(bench, args)
    profile_worker(bench, 64, args)
    report.write(args.out)
    runner.close()


if __name__ == "__main__":
    main()
