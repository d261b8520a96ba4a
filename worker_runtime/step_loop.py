"""The step loop: take commands, plan, launch, wait, apply, publish. One thread, one executor.

An engine that runs steps on a device of its own gets the next step before the loop waits for the
one that runs, so the device never waits for this thread. The plan of that step takes the tokens in
flight into account (worker_runtime.flight).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from engine.batch import StepBatch, StepResult
from engine.executor import PendingStep
from observability.logging import get_logger
from worker_runtime.clock import Clock
from worker_runtime.cores import SharedCores
from worker_runtime.inbox import Inbox

#: How long before the end of the step on its way the next one is planned: what planning and
#: launching have taken lately, but for the slowest few, half of that again for the other ranks of
#: an engine, which begin later, and what waking up may take.
_LEAD_SHARE = 1.5
_LEAD_S = 0.0005
_REMEMBERED = 32
_OUTLIERS = 2

C = TypeVar("C")
CIn = TypeVar("CIn", contravariant=True)
log = get_logger(__name__)


class Driver(Protocol[CIn]):
    """What a worker puts into the loop. All methods run on the step thread."""

    def handle(self, command: CIn, now: float) -> None:
        """Take one command into the scheduler's state."""
        ...

    def plan(self, now: float) -> StepBatch | None:
        """The next step, which is launched at once, or None when nothing can run."""
        ...

    def launched(self, step: int) -> None:
        """The planned step was launched, under this number (engine.executor.PendingStep)."""
        ...

    def apply(self, result: StepResult, now: float) -> None:
        """Take the tokens of the oldest launched step into the scheduler's state."""
        ...

    def publish(self) -> None:
        """Hand everything decided since the last call to the event loop."""
        ...

    def lasts(self, now: float) -> float:
        """Seconds for which the step on its way is sure to run on; not positive when unknown."""
        ...

    def admit(self, now: float) -> None:
        """Give what has just come in what it can have before the next step is planned."""
        ...

    def next_deadline(self) -> float | None:
        """When something must be looked at even if no command arrives."""
        ...

    def fail_all(self, error: Exception) -> None:
        """The engine is broken: end every request with a typed error."""
        ...


class StepExecutor(Protocol):
    """The part of an executor that the loop uses. `depth`: how many steps are on their way at
    once, 1 when `launch` returns with the step over."""

    depth: int

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start one step; steps run in the order of launch."""
        ...

    def use_threads(self, count: int) -> None:
        """Run the steps that are launched from now on with `count` threads."""
        ...


class StepLoop(Generic[C]):
    """Runs a driver on a thread of its own until `stop`, or until the engine breaks."""

    def __init__(
        self,
        *,
        name: str,
        driver: Driver[C],
        executor: StepExecutor,
        inbox: Inbox[C],
        clock: Clock,
        cores: SharedCores | None = None,
    ) -> None:
        """With `cores`, steps share the machine's cores with those of its other workers."""
        self._driver = driver
        self._cores = cores
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._launched: deque[PendingStep] = deque()
        self._step_started: float | None = None
        # Seconds that planning and launching each of the last steps took.
        self._launches: deque[float] = deque(maxlen=_REMEMBERED)
        self._lead = _LEAD_S
        self.steps = 0
        self.last_step_end = clock()
        self.broken: Exception | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the steps on their way; False when they did not end in time."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds that the step now running has taken; 0 when idle (idle is healthy)."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._turn()
            while self._launched:
                self._land()
        except Exception as error:
            log.exception("step loop ended")
            self.broken = error
            self._fail_all(error)
        finally:
            if self._cores is not None:
                self._cores.close()

    def _fail_all(self, error: Exception) -> None:
        """Until this worker is replaced, end at once whatever still comes in."""
        if self._cores is not None:
            self._cores.release()
        while True:
            for command in self._inbox.drain():
                self._driver.handle(command, self._clock())
            self._driver.fail_all(error)
            self._driver.publish()
            if self._inbox.closed:
                return
            self._inbox.wait(None)

    def _turn(self) -> None:
        """Take what has come, launch a step when it is time, and wait for one once `depth` are on
        their way or no more can be launched.

        It is time shortly before the step on its way can end: what arrives until then is in the
        next step instead of the one after it.
        """
        now = self._clock()
        for command in self._inbox.drain():
            self._driver.handle(command, now)
        if self._launched and (left := self._driver.lasts(now) - self._lead) > 0.0:
            self._driver.admit(now)
            self._driver.publish()
            self._inbox.wait(left)
            return
        batch = self._driver.plan(now)
        self._driver.publish()
        if batch is not None:
            self._launch(batch, now)
            if len(self._launched) == self._executor.depth:
                self._land()
        elif self._launched:
            self._land()
        else:
            if self._cores is not None:
                self._cores.release()
            deadline = self._driver.next_deadline()
            self._inbox.wait(None if deadline is None else max(0.0, deadline - self._clock()))

    def _launch(self, batch: StepBatch, now: float) -> None:
        if self._step_started is None:
            self._step_started = time.monotonic()
        if self._cores is not None:
            self._executor.use_threads(self._cores.take())
        pending = self._executor.launch(batch)
        self._launches.append(self._clock() - now)
        usual = sorted(self._launches)[: max(1, len(self._launches) - _OUTLIERS)]
        self._lead = _LEAD_SHARE * usual[-1] + _LEAD_S
        self._launched.append(pending)
        self._driver.launched(pending.number)

    def _land(self) -> None:
        result = self._launched[0].wait()
        self._launched.popleft()
        now = self._clock()
        self._step_started = time.monotonic() if self._launched else None
        self.steps += 1
        self.last_step_end = now
        self._driver.apply(result, now)
        self._driver.publish()
