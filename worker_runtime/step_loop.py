"""The step loop: take commands, plan, run, apply, publish. One thread, one executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.batch import StepBatch, StepResult
from observability.logging import get_logger
from worker_runtime.clock import Clock
from worker_runtime.inbox import Inbox

C = TypeVar("C")
CIn = TypeVar("CIn", contravariant=True)
log = get_logger(__name__)


class Driver(Protocol[CIn]):
    """What a worker puts into the loop. All methods run on the step thread."""

    def handle(self, command: CIn, now: float) -> None:
        """Take one command into the scheduler's state."""
        ...

    def plan(self, now: float) -> StepBatch | None:
        """The next step, or None when nothing can run."""
        ...

    def apply(self, result: StepResult, now: float) -> None:
        """Take the step's tokens into the scheduler's state."""
        ...

    def publish(self) -> None:
        """Hand everything decided since the last call to the event loop."""
        ...

    def next_deadline(self) -> float | None:
        """When something must be looked at even if no command arrives."""
        ...

    def fail_all(self, error: Exception) -> None:
        """The engine is broken: end every request with a typed error."""
        ...


class StepExecutor(Protocol):
    """The part of an executor that the loop uses."""

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step."""
        ...


class StepLoop(Generic[C]):
    """Runs a driver on a thread of its own until `stop`, or until the engine breaks."""

    def __init__(
        self, *, name: str, driver: Driver[C], executor: StepExecutor, inbox: Inbox[C], clock: Clock
    ) -> None:
        self._driver = driver
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._step_started: float | None = None
        self.steps = 0
        self.last_step_end = clock()
        self.broken: Exception | None = None
        self.on_broken: Callable[[Exception], None] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the current step; False when it did not end in time."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds that the step now running has taken; 0 when idle (idle is healthy)."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
        except Exception as error:
            log.exception("step loop ended")
            self.broken = error
            self._driver.fail_all(error)
            self._driver.publish()
            if self.on_broken is not None:
                self.on_broken(error)

    def _turn(self) -> None:
        now = self._clock()
        for command in self._inbox.drain():
            self._driver.handle(command, now)
        batch = self._driver.plan(now)
        self._driver.publish()
        if batch is None:
            deadline = self._driver.next_deadline()
            self._inbox.wait(None if deadline is None else max(0.0, deadline - self._clock()))
            return
        self._step_started = now
        result = self._executor.run(batch)
        self._step_started = None
        self.steps += 1
        self.last_step_end = self._clock()
        self._driver.apply(result, self.last_step_end)
        self._driver.publish()
