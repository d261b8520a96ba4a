"""The step loop: order of launches and landings, and a real engine that runs behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode_worker.commands import Output
from decode_worker.scheduler import DecodeScheduler
from engine.batch import SequenceStep, StepBatch, StepResult
from engine.executor import FinishedStep
from engine.kv.allocator import BlockAllocator
from engine.local import LocalEngine
from protocol.ids import RequestKey
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.support.engine import GREEDY, config, prompt, whole_runner
from tests.support.paged import LateSteps
from tests.support.tiny import save_tiny_llama
from worker_runtime.commands import Submitted
from worker_runtime.config import WorkerConfig
from worker_runtime.driver import SchedulerDriver
from worker_runtime.inbox import Inbox
from worker_runtime.shell import Snapshot
from worker_runtime.step_loop import StepLoop


class CountingDriver:
    """Runs one step for every command and notes what happened in which order."""

    def __init__(self, num_steps: int) -> None:
        self.todo: list[int] = []
        self.events: list[str] = []
        self.failed: Exception | None = None
        self.done = threading.Event()
        self._num_steps = num_steps

    @property
    def applied(self) -> list[str]:
        return [event for event in self.events if event.startswith("apply")]

    def handle(self, command: int, now: float) -> None:
        self.todo.append(command)

    def plan(self, now: float) -> StepBatch | None:
        if not self.todo:
            return None
        token = self.todo.pop(0)
        self.events.append(f"plan {token}")
        step = SequenceStep(tokens=(token,), start=0, block_ids=(0,), sampling=SamplingParams())
        return StepBatch(sequences=(step,))

    def apply(self, result: StepResult, now: float) -> None:
        self.events.append(f"apply {result.tokens[0]}")

    def publish(self) -> None:
        if len(self.applied) == self._num_steps or self.failed is not None:
            self.done.set()

    def next_deadline(self) -> float | None:
        return None

    def fail_all(self, error: Exception) -> None:
        self.failed = error


def echo(batch: StepBatch) -> StepResult:
    """Samples the token it was given; breaks on 13."""
    token = batch.sequences[0].tokens[0]
    if token == 13:
        raise RuntimeError("device lost")
    return StepResult(tokens=(token,))


class EchoExecutor:
    depth = 1

    def launch(self, batch: StepBatch) -> FinishedStep:
        return FinishedStep(echo(batch))


def run(executor: EchoExecutor | LateSteps, tokens: list[int]) -> tuple[CountingDriver, StepLoop]:
    driver, inbox = CountingDriver(len(tokens)), Inbox[int]()
    loop = StepLoop(name="t", driver=driver, executor=executor, inbox=inbox, clock=time.time)
    for token in tokens:
        inbox.put(token)
    loop.start()
    assert driver.done.wait(5)
    assert loop.stop()
    return driver, loop


def test_engine_on_this_thread_gets_one_step_at_a_time() -> None:
    driver, loop = run(EchoExecutor(), [4, 5])
    assert driver.events == ["plan 4", "apply 4", "plan 5", "apply 5"]
    assert loop.steps == 2
    assert loop.stalled_for() == 0.0


def test_engine_on_a_device_gets_the_next_step_before_the_last_is_over() -> None:
    driver, loop = run(LateSteps(echo, depth=2), [4, 5, 6])
    assert driver.events == ["plan 4", "plan 5", "apply 4", "plan 6", "apply 5", "apply 6"]
    assert loop.steps == 3
    assert loop.stalled_for() == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_broken_engine_fails_everything_and_is_remembered(depth: int) -> None:
    executor = EchoExecutor() if depth == 1 else LateSteps(echo, depth)
    driver, loop = run(executor, [4, 13])
    assert str(loop.broken) == "device lost"
    assert driver.failed is loop.broken
    assert driver.applied == ["apply 4"]


def test_stop_takes_in_what_is_on_its_way() -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(batch: StepBatch) -> StepResult:
        started.set()
        assert go_on.wait(5)
        return echo(batch)

    driver, inbox = CountingDriver(3), Inbox[int]()
    executor = LateSteps(slow, depth=2)
    loop = StepLoop(name="t", driver=driver, executor=executor, inbox=inbox, clock=time.time)
    for token in (4, 5, 6):
        inbox.put(token)
    loop.start()
    assert started.wait(5)
    assert loop.stalled_for() > 0.0
    assert not loop.stop(0.01)
    go_on.set()
    assert loop.stop()
    assert driver.applied == ["apply 4", "apply 5"]
    assert loop.stalled_for() == 0.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


async def served(
    path: str, requests: Sequence[tuple[list[int], SamplingParams]], *, depth: int, num_blocks: int
) -> tuple[list[list[int]], DecodeScheduler]:
    """The output of each request through scheduler, driver and loop on a real engine."""
    runner = whole_runner(path, num_blocks=num_blocks)
    blocks = BlockAllocator(num_blocks, runner.layout.block_size)
    scheduler = DecodeScheduler(
        config=WorkerConfig(max_num_seqs=6, max_num_batched_tokens=24, watermark=0.0),
        blocks=blocks,
        fingerprint=runner.fingerprint,
        place="d0",
    )
    outputs: dict[str, list[int]] = {}
    done = asyncio.Event()

    def deliver(out: Output, snapshot: Snapshot, _accepted: int) -> None:
        for event in (e for events in out.events.values() for e in events.tokens):
            tokens = outputs.setdefault(event.key.request_id, [])
            assert event.index == len(tokens)
            tokens.append(event.token)
        if snapshot.num_unfinished == 0 and len(outputs) == len(requests):
            done.set()

    inbox: Inbox[object] = Inbox()
    for i, (ids, sampling) in enumerate(requests):
        submit = Submit(
            key=RequestKey(str(i)),
            router_id="r",
            prompt_ids=tuple(ids),
            sampling=sampling,
            deadline=1e12,
        )
        inbox.put(Submitted(submit=submit))
    driver = SchedulerDriver(
        scheduler,
        new_output=Output,
        is_submit=lambda command: isinstance(command, Submitted),
        loop=asyncio.get_running_loop(),
        deliver=deliver,
    )
    executor = LateSteps(lambda batch: runner.run(runner.prepare(batch)), depth)
    loop = StepLoop(name="steps", driver=driver, executor=executor, inbox=inbox, clock=time.time)  # type: ignore[misc]
    loop.start()
    await asyncio.wait_for(done.wait(), 30)
    assert await asyncio.to_thread(loop.stop)
    blocks.check()
    assert blocks.num_available == num_blocks
    return [outputs[str(i)] for i in range(len(requests))], scheduler


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [6, 64])
async def test_ids_equal_the_local_engine(tiny: str, depth: int, num_blocks: int) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=14, seed=5, ignore_eos=True)
    requests = [(prompt(n), GREEDY if n % 2 else seeded) for n in (1, 7, 8, 12, 15, 20)]
    wanted = LocalEngine(config(tiny)).generate(requests)
    stopped = replace(seeded, stop_token_ids=(wanted[2][4],))
    requests[2] = (requests[2][0], stopped)
    wanted[2] = wanted[2][: wanted[2].index(wanted[2][4]) + 1]
    got, scheduler = await served(tiny, requests, depth=depth, num_blocks=num_blocks)
    assert got == wanted
    assert (scheduler.num_preemptions > 0) == (num_blocks == 6)
