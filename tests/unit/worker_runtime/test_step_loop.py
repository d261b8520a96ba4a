"""The step loop: order of launches and landings, and a real engine that runs behind it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from engine.batch import SequenceStep, StepBatch, StepResult
from engine.cpu.runner import FinishedStep
from engine.executor import PendingStep
from protocol.errors import ErrorInfo
from protocol.ids import Role
from protocol.sampling import SamplingParams
from tests.support.engine import GREEDY, config, prompt, whole_runner
from tests.support.held import Held
from tests.support.local_engine import LocalEngine
from tests.support.paged import LateSteps
from tests.support.steps import served
from tests.support.submits import make_submit
from tests.support.tiny import save_tiny_llama
from worker_runtime.cores import SharedCores
from worker_runtime.scheduling.messages import Snapshot, StepOutput, Submitted
from worker_runtime.step_loop import Inbox, StepLoop


class CountingScheduler:
    """Runs one step for every command and notes what happened in which order."""

    def __init__(self, num_steps: int) -> None:
        self.todo: list[int] = []
        self.events: list[str] = []
        self.failed = ""
        self.numbers: list[int] = []
        self.num_plans = 0
        self.done = threading.Event()
        self._num_steps = num_steps
        self.output = StepOutput()

    @property
    def applied(self) -> list[str]:
        return [event for event in self.events if event.startswith("apply")]

    def take_output(self) -> StepOutput:
        return StepOutput()

    def handle(self, command: int, now: float) -> None:
        self.todo.append(command)

    def plan(self, now: float) -> StepBatch | None:
        self.num_plans += 1
        if not self.todo:
            return None
        token = self.todo.pop(0)
        self.events.append(f"plan {token}")
        step = SequenceStep(
            tokens=(token,), start=0, block_tables=((0,),), sampling=SamplingParams()
        )
        return StepBatch(sequences=(step,))

    def launched(self, step: int) -> None:
        self.numbers.append(step)

    def apply(self, result: StepResult, now: float) -> None:
        self.events.append(f"apply {result.tokens[0]}")

    def snapshot(self) -> Snapshot:
        if len(self.applied) == self._num_steps or self.failed:
            self.done.set()
        return Snapshot()

    def remaining_s(self, now: float) -> float:
        return 0.0

    def admit(self, now: float) -> None:
        self.events.append("admit")

    def next_deadline(self) -> float:
        return math.inf

    def num_leaked_blocks(self) -> int:
        return 0

    def fail_all(self, error: ErrorInfo) -> None:
        self.failed = error.message


def step_loop(scheduler: CountingScheduler, executor: Any, inbox: Any, clock=time.time):
    return StepLoop(
        name="t",
        scheduler=scheduler,
        deliver=lambda *_: None,
        executor=executor,
        inbox=inbox,
        clock=clock,
    )


def echo(batch: StepBatch) -> StepResult:
    """Samples the token it was given; breaks on 13."""
    if (token := batch.sequences[0].tokens[0]) == 13:
        raise RuntimeError("device lost")
    return StepResult(tokens=(token,))


class EchoExecutor:
    depth = 1
    num_ranks = 1
    token_s = 0.0

    def launch(self, batch: StepBatch) -> FinishedStep:
        return FinishedStep(echo(batch))

    def use_threads(self, count: int) -> None:
        self.threads = count

    def progress(self) -> str:
        return ""

    def enter_thread(self) -> None:
        pass

    def while_launching(self, function: Callable[[], None]) -> None:
        pass


def run(executor: Any, tokens: list[int]) -> tuple[CountingScheduler, StepLoop]:
    scheduler, inbox = CountingScheduler(len(tokens)), Inbox[int]()
    loop = step_loop(scheduler, executor, inbox)
    for token in tokens:
        inbox.put(token)
    loop.start()
    assert scheduler.done.wait(60)
    assert loop.stop()
    return scheduler, loop


def test_engine_on_this_thread_gets_one_step_at_a_time() -> None:
    scheduler, loop = run(EchoExecutor(), [4, 5])
    assert scheduler.events == ["plan 4", "apply 4", "plan 5", "apply 5"]
    assert loop.steps == 2
    assert loop.stalled_for() == 0.0


def test_engine_on_a_device_gets_the_next_step_before_the_last_is_over() -> None:
    scheduler, loop = run(LateSteps(echo, depth=2), [4, 5, 6])
    assert scheduler.events == ["plan 4", "plan 5", "apply 4", "plan 6", "apply 5", "apply 6"]
    assert len(set(scheduler.numbers)) == 3  # what each has written may be sent once it has run
    assert loop.steps == 3
    assert loop.stalled_for() == 0.0


def test_requests_that_change_nothing_else_are_counted_for_those_who_wait() -> None:
    """Else the worker would take them for still on their way, and refuse more in the end."""
    inbox, told = Inbox[Any](), list[int]()
    all_told = threading.Event()

    class Quiet(CountingScheduler):
        def handle(self, command: Any, now: float) -> None:
            """Nothing to run, nothing to tell."""

    def deliver(_output: StepOutput, _snapshot: Snapshot, accepted: int) -> None:
        told.append(accepted)
        if sum(told) == 20:
            all_told.set()

    loop = StepLoop(
        name="t",
        scheduler=Quiet(9),
        deliver=deliver,
        executor=EchoExecutor(),
        inbox=inbox,
        clock=time.time,
    )
    loop.start()
    for number in range(20):
        inbox.put(Submitted(submit=make_submit(), role=Role.DECODE))
        if number % 5 == 0:
            time.sleep(0.01)
    assert all_told.wait(60)
    assert loop.stop()
    assert sum(told) == 20


def test_an_idle_worker_leaves_its_cores_to_others(tmp_path: Path) -> None:
    inbox, idle, scheduler = Inbox[int](), threading.Event(), CountingScheduler(1)
    cores, other = (SharedCores(tmp_path, 8, lambda: 0) for _ in range(2))
    looks = iter([0.0])

    def next_deadline() -> float:
        if scheduler.applied and next(looks, None) is None:  # a second look, behind the release
            idle.set()
        return math.inf if idle.is_set() else 0.0

    scheduler.next_deadline = next_deadline  # type: ignore[method-assign]
    executor = EchoExecutor()
    loop = StepLoop(
        name="t",
        scheduler=scheduler,
        deliver=lambda *_: None,
        executor=executor,
        inbox=inbox,
        clock=time.time,
        cores=cores,
    )
    inbox.put(4)
    loop.start()
    assert idle.wait(60)
    assert (executor.threads, other.take()) == (8, 8)
    time.sleep(0.05)
    assert scheduler.num_plans < 10  # it waits for a command
    assert loop.stop()
    other.close()


class LaunchesLong(LateSteps):
    is_over = True

    def while_launching(self, function: Any) -> None:
        self.between, self.loop, self.seen = function, function.__self__, list[tuple[int, bool]]()

    def launch(self, batch: StepBatch) -> PendingStep:
        self.between()
        self.seen.append((self.num_over, self.loop._step_started is not None))
        return super().launch(batch)


@pytest.mark.parametrize(("ends", "over"), [(True, [0, 1, 2]), (False, [0, 0, 1])])
def test_a_step_that_ends_while_the_next_one_is_launched_lands_at_once(ends, over) -> None:
    executor = LaunchesLong(echo, depth=2)
    executor.is_over = ends
    _, loop = run(executor, [4, 5, 6])
    assert executor.seen == [(count, True) for count in over]
    assert (loop.steps, loop.stalled_for()) == (3, 0.0)


class EnteredExecutor(EchoExecutor):
    """Notes in which thread it is got ready, and takes its time."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.may_enter = threading.Event()
        self._error = error

    def enter_thread(self) -> None:
        assert self.may_enter.wait(60)
        self.calls.append(("enter", threading.current_thread().name))
        if self._error is not None:
            raise self._error

    def launch(self, batch: StepBatch) -> FinishedStep:
        self.calls.append(("launch", threading.current_thread().name))
        return super().launch(batch)


def test_the_thread_of_the_steps_is_ready_before_the_first_and_before_start_returns() -> None:
    scheduler, inbox, executor = CountingScheduler(1), Inbox[int](), EnteredExecutor()
    loop = step_loop(scheduler, executor, inbox)
    inbox.put(4)
    starting = threading.Thread(target=loop.start)
    starting.start()
    starting.join(0.05)
    assert starting.is_alive()
    executor.may_enter.set()
    starting.join(60)
    assert not starting.is_alive()
    assert executor.calls[0] == ("enter", "t")
    assert scheduler.done.wait(60)
    assert loop.stop()
    assert executor.calls == [("enter", "t"), ("launch", "t")]


def test_an_engine_that_cannot_be_got_ready_fails_the_start_and_what_waits() -> None:
    scheduler, inbox = CountingScheduler(1), Inbox[int]()
    executor = EnteredExecutor(RuntimeError("no plan"))
    executor.may_enter.set()
    loop = step_loop(scheduler, executor, inbox)
    inbox.put(4)
    with pytest.raises(RuntimeError, match="no plan"):
        loop.start()
    assert scheduler.done.wait(60)
    assert loop.stop()
    assert str(loop.broken) == "no plan"
    assert scheduler.applied == []
    assert executor.calls == [("enter", "t")]


@pytest.mark.parametrize("depth", [1, 2])
def test_broken_engine_fails_everything_and_is_remembered(depth: int) -> None:
    executor = EchoExecutor() if depth == 1 else LateSteps(echo, depth)
    scheduler, loop = run(executor, [4, 13])
    assert str(loop.broken) == "device lost"
    assert scheduler.failed == "the engine broke: RuntimeError: device lost"
    assert scheduler.applied == ["apply 4"]


def test_what_reaches_a_broken_engine_fails_too() -> None:
    scheduler, inbox = CountingScheduler(9), Inbox[int]()
    loop = step_loop(scheduler, EchoExecutor(), inbox)
    inbox.put(13)
    loop.start()
    assert scheduler.done.wait(60)
    scheduler.failed = ""
    scheduler.done.clear()
    inbox.put(4)
    assert scheduler.done.wait(60)
    assert scheduler.failed == "the engine broke: RuntimeError: device lost"
    assert (scheduler.todo, scheduler.applied) == ([4], [])
    assert loop.stop()


def test_blocks_that_are_lost_are_told_of_once(lost_blocks: list[int]) -> None:
    lost = [0, 3, 3, 5, 0, 2]
    looked = threading.Event()

    class Leaking(CountingScheduler):
        def num_leaked_blocks(self) -> int:
            count = lost.pop(0)
            if not lost:
                looked.set()
            return count

        def next_deadline(self) -> float:
            return 0.0 if lost else math.inf

    loop = step_loop(Leaking(0), EchoExecutor(), Inbox[int]())
    loop.start()
    assert looked.wait(60)
    assert loop.stop()
    assert lost_blocks == [3, 5, 2]
    lost_blocks.clear()


def test_stop_takes_in_what_is_on_its_way() -> None:
    held = Held()

    def slow(batch: StepBatch) -> StepResult:
        held()
        return echo(batch)

    scheduler, inbox = CountingScheduler(3), Inbox[int]()
    executor = LateSteps(slow, depth=2)
    loop = step_loop(scheduler, executor, inbox)
    for token in (4, 5, 6):
        inbox.put(token)
    loop.start()
    assert held.begun()
    assert loop.stalled_for() > 0.0
    assert not loop.stop(0.01)
    held.release()
    assert loop.stop()
    assert scheduler.applied == ["apply 4", "apply 5"]
    assert loop.stalled_for() == 0.0


def test_a_thread_that_stands_still_between_steps_is_a_stall() -> None:
    held = Held()

    class Standing(CountingScheduler):
        def plan(self, now: float) -> StepBatch | None:
            held()
            return super().plan(now)

    scheduler, inbox = Standing(2), Inbox[int]()
    loop = step_loop(scheduler, EchoExecutor(), inbox)
    inbox.put(4)
    loop.start()
    assert held.begun()
    assert loop.stalled_for() == 0.0  # it has taken everything
    inbox.put(5)
    time.sleep(0.02)
    assert 0.02 <= loop.stalled_for() < 60.0
    assert loop.standstill() == "between two steps, 0 steps have ended"
    held.release()
    assert scheduler.done.wait(60)
    assert loop.stop()
    assert loop.stalled_for() == 0.0


def test_a_step_may_take_a_few_times_as_long_as_the_longest_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(
        "worker_runtime.step_loop.time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )

    def slow(batch: StepBatch) -> StepResult:
        nonlocal now
        now += 0.05
        return echo(batch)

    held = Held()

    def hanging(batch: StepBatch) -> StepResult:
        if batch.sequences[0].tokens[0] == 5:
            held()
        return slow(batch)

    inbox = Inbox[int]()
    loop = step_loop(CountingScheduler(2), LateSteps(hanging, depth=2), inbox)
    inbox.put(4)
    inbox.put(5)
    loop.start()
    assert held.begun()
    assert loop.stalled_for() == 0.0
    now += 0.3
    assert loop.stalled_for() == pytest.approx(0.3 - 4 * 0.05)
    held.release()
    assert loop.stop()


def test_a_step_of_many_tokens_on_a_cpu_may_take_its_time() -> None:
    held = Held()

    def slow(batch: StepBatch) -> StepResult:
        held()
        return echo(batch)

    executor, inbox = LateSteps(slow, depth=2), Inbox[int]()
    executor.token_s = 1000.0
    loop = step_loop(CountingScheduler(1), executor, inbox)
    inbox.put(4)
    loop.start()
    assert held.begun()
    time.sleep(0.02)
    assert loop.stalled_for() == 0.0
    held.release()
    assert loop.stop()


def test_what_arrives_while_a_step_lasts_is_admitted_at_once_and_in_the_next_one() -> None:
    arriving = [5, 6]

    class Lasting(CountingScheduler):
        def remaining_s(self, now: float) -> float:
            if not arriving:
                return 0.0
            inbox.put(arriving.pop(0))
            return 1e9

    scheduler, inbox = Lasting(3), Inbox[int]()
    executor = LateSteps(echo, depth=2)
    loop = step_loop(scheduler, executor, inbox)
    inbox.put(4)
    loop.start()
    assert scheduler.done.wait(60)
    assert loop.stop()
    assert scheduler.events == [
        "plan 4",
        "admit",
        "admit",
        "plan 5",
        "apply 4",
        "plan 6",
        "apply 5",
        "apply 6",
    ]


@pytest.mark.parametrize(
    ("first_s", "device_s", "lead_s"),
    [(None, 0.1, 0.02), (0.002, 0.1, 0.002), (0.002, 0.02, 0.006), (0.002, 0.0, 0.02)],
)
def test_steps_are_planned_earlier_the_longer_launching_has_taken(
    first_s: float | None, device_s: float, lead_s: float
) -> None:
    """Steps of 100 ms whose launches take 20 ms: the next is planned before 80 ms have passed, or
    later where the device can begin after the first layer's launch and outlasts the others."""
    now = [0.0]
    planned: list[float] = []

    class Clocked(CountingScheduler):
        def plan(self, at: float) -> StepBatch | None:
            planned.append(at)
            return super().plan(at)

        def remaining_s(self, at: float) -> float:
            return planned[-1] + 0.1 - at

    class Slow(LateSteps):
        def while_launching(self, function: Callable[[], None]) -> None:
            self.between = function

        def launch(self, batch: StepBatch) -> PendingStep:
            for passed in () if first_s is None else (first_s, 0.001):
                now[0] += passed
                self.between()
            now[0] += 0.02 - (first_s + 0.001 if first_s else 0.0)
            return super().launch(batch)

    class Passing(Inbox[int]):
        def wait(self, timeout_s: float) -> None:
            if timeout_s == math.inf:
                super().wait(timeout_s)
            else:
                now[0] += timeout_s + 1e-9

    scheduler, inbox = Clocked(40), Passing()
    executor = Slow(lambda b: StepResult(tokens=echo(b).tokens, device_s=device_s), depth=2)
    loop = step_loop(scheduler, executor, inbox, lambda: now[0])
    for token in range(20, 60):
        inbox.put(token)
    loop.start()
    assert scheduler.done.wait(60)
    assert loop.stop()
    gaps = [b - a for a, b in pairwise(planned[:40])]
    assert gaps[0] == pytest.approx(0.1 - 0.02 - 0.0005)
    assert gaps[-5:] == pytest.approx([0.1 - lead_s - 0.0005] * 5)


def test_a_step_is_timed_by_the_monotonic_clock() -> None:
    now = 1000.0
    held = Held()

    def slow(batch: StepBatch) -> StepResult:
        held()
        return echo(batch)

    inbox = Inbox[int]()
    loop = step_loop(CountingScheduler(1), LateSteps(slow, depth=2), inbox, lambda: now)
    inbox.put(4)
    loop.start()
    assert held.begun()
    now += 86400.0
    assert 0.0 < loop.stalled_for() < 60.0
    held.release()
    assert loop.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [6, 64])
async def test_ids_equal_the_local_engine(tiny: str, depth: int, num_blocks: int) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=14, seed=5, ignore_eos=True)
    requests = [(prompt(n), GREEDY if n % 2 else seeded) for n in (1, 7, 8, 12, 15, 20)]
    wanted = LocalEngine(config(tiny)).generate(requests)
    stopped = replace(seeded, stop_token_ids=(wanted[2][4],))
    requests[2] = (requests[2][0], stopped)
    wanted[2] = wanted[2][: wanted[2].index(wanted[2][4]) + 1]
    runner = whole_runner(tiny, num_blocks=num_blocks)
    executor = LateSteps(lambda batch: runner.submit(runner.prepare(batch)).wait(), depth)
    got, num_preemptions = await served(executor, runner.layout, runner.fingerprint, requests)
    assert got == wanted
    assert (num_preemptions > 0) == (num_blocks == 6)
