"""The step loop: take commands, plan, launch, wait, apply, publish. One thread, one executor.

An engine that runs steps on a device of its own gets the next step before the loop waits for the
running one, so the device never waits for this thread. The plan of that step takes steps in flight
into account (worker_runtime.scheduling.inflight_steps).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from engine.batch import StepBatch
from engine.executor import Executor, PendingStep
from observability.logging import get_logger
from protocol.errors import Internal
from worker_runtime.cores import SharedCores
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.messages import (
    Command,
    Snapshot,
    StepOutput,
    Submitted,
)

#: The lead is what most of the latest launches needed, half of that again for other ranks, which
#: begin later, and time to wake up. With less the device idles; with more, what arrives meanwhile
#: waits for a step more.
_LEAD_SHARE = 0.85
_RANKS_FACTOR = 1.5
_LEAD_S = 0.0005
_HISTORY = 32
#: So much of a step's time on the device its later layers may take to launch. The time includes
#: pauses in which the device waited for them, so with 1 a step bound by them would need no lead.
_BESIDE_SHARE = 0.7
#: A step may take so many times the longest one before a stall is timed.
_PATIENCE = 4.0

C = TypeVar("C")
#: Takes the output of an iteration, the scheduler's state after it, and the number of requests that
#: entered the scheduler.
Deliver = Callable[[StepOutput, Snapshot, int], object]
log = get_logger(__name__)


class Inbox(Generic[C]):
    """The only way into the step thread: many producers, one consumer, which waits without
    polling."""

    def __init__(self) -> None:
        self._items: deque[C] = deque()
        self._num_put = 0
        self._oldest = 0.0  # when the first of the items came
        self._ready = threading.Condition()
        self.closed = False

    def put(self, command: C) -> int:
        """Add a command; callable from any thread. Returns how many were added so far."""
        with self._ready:
            if not self._items:
                self._oldest = time.monotonic()
            self._items.append(command)
            self._num_put += 1
            self._ready.notify()
            return self._num_put

    def age(self) -> float:
        """Seconds that the oldest command has waited; 0 without one."""
        with self._ready:
            return time.monotonic() - self._oldest if self._items else 0.0

    def close(self) -> None:
        with self._ready:
            self.closed = True
            self._ready.notify()

    def drain(self) -> list[C]:
        with self._ready:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self, timeout_s: float) -> None:
        """Return when there is a command, the inbox is closed, or time is over."""
        with self._ready:
            if not self._items and not self.closed:
                self._ready.wait(min(timeout_s, threading.TIMEOUT_MAX))


@dataclass(frozen=True, slots=True)
class _Launch:
    """Seconds of one step: from its plan to the launch of its first layer, to the end of its
    launch, and on the device, 0 until it has landed."""

    first_s: float
    whole_s: float
    device_s: float = 0.0

    @property
    def lead_s(self) -> float:
        """The device runs the first layers while the host launches the others."""
        beside_s = self.whole_s - self.first_s - _BESIDE_SHARE * self.device_s
        return self.first_s + max(0.0, beside_s)


class PlanLead:
    """How long before the running step ends the next one is planned (decisions 59 and 81): learned
    from the latest steps, which land in the order of their launches. seconds: the lead of the next
    plan."""

    def __init__(self, num_ranks: int) -> None:
        self._factor = _RANKS_FACTOR if num_ranks > 1 else 1.0
        self._launches: deque[_Launch] = deque(maxlen=_HISTORY)
        self._in_flight = 0
        self.seconds = _LEAD_S

    def launched(self, *, first_s: float, whole_s: float) -> None:
        """From a step's plan to the launch of its first layer, and to the end of its launch."""
        self._launches.append(_Launch(first_s, whole_s))
        self._in_flight += 1
        usual_s = sorted(launch.lead_s for launch in self._launches)
        self.seconds = usual_s[int(_LEAD_SHARE * len(usual_s))] * self._factor + _LEAD_S

    def landed(self, device_s: float) -> None:
        """The oldest step in flight took so long on its device; 0 where none measures."""
        at = -self._in_flight
        self._launches[at] = replace(self._launches[at], device_s=device_s)
        self._in_flight -= 1


class StepLoop:
    """Runs a scheduler on a thread of its own until `stop`, or until the engine breaks. `deliver`
    takes the output of every iteration, on that thread."""

    def __init__(
        self,
        *,
        name: str,
        scheduler: BothRoles,
        deliver: Deliver,
        executor: Executor,
        inbox: Inbox[Command],
        clock: Callable[[], float],
        cores: SharedCores | None = None,
    ) -> None:
        """With `cores`, steps share the machine's cores with other workers."""
        self._scheduler = scheduler
        self._deliver = deliver
        self._accepted = 0
        self._last = Snapshot()
        self._cores = cores
        self._executor = executor
        executor.while_launching(self._land_over)
        self._inbox = inbox
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._entered: Future[None] = Future()
        self._launched: deque[PendingStep] = deque()
        self._launching = False
        self._first_layer: float | None = None  # when that of the step being launched was
        self._step_started: float | None = None
        self._lead = PlanLead(executor.num_ranks)
        self._num_leaked_blocks = 0
        self._expected_s = 0.0  # of the longest step so far, or of the running one
        self.steps = 0
        self.last_step_end = clock()
        self.broken: Exception | None = None

    def start(self) -> None:
        """Start the thread; returns once it can launch steps, raises what the engine raises."""
        self._thread.start()
        self._entered.result()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the launched steps; False when they did not end in time."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds without progress: of the running step, or of a command that the thread has not
        taken, wherever it stands; 0 when idle. A step may take a few times as long as the longest
        before it, or as its tokens should, so that time counts only beyond that."""
        started = self._step_started
        running = 0.0 if started is None else time.monotonic() - started
        return max(0.0, max(running, self._inbox.age()) - _PATIENCE * self._expected_s)

    def standstill(self) -> str:
        """Where the loop and the ranks of its engine stand, for people."""
        where = "a step is running" if self._step_started is not None else "between two steps"
        return f"{where}, {self.steps} steps have ended{self._executor.progress()}"

    def _run(self) -> None:
        try:
            self._enter_thread()
            while not self._inbox.closed:
                self._iterate()
            while self._launched:
                self._land()
        except Exception as error:
            log.exception("step loop ended")
            self.broken = error
            self._fail_all(error)
        finally:
            if self._cores is not None:
                self._cores.close()

    def _enter_thread(self) -> None:
        try:
            self._executor.enter_thread()
        except BaseException as error:
            self._entered.set_exception(error)
            raise
        self._entered.set_result(None)

    def _fail_all(self, error: Exception) -> None:
        """Fail every request, also those that still arrive, until this worker is replaced."""
        if self._cores is not None:
            self._cores.release()
        info = Internal(f"the engine broke: {type(error).__name__}: {error}").info()
        while True:
            self._take_commands(self._clock())
            self._scheduler.fail_all(info)
            self._publish()
            if self._inbox.closed:
                return
            self._inbox.wait(math.inf)

    def _take_commands(self, now: float) -> None:
        for command in self._inbox.drain():
            self._accepted += isinstance(command, Submitted)
            self._scheduler.handle(command, now)

    def _publish(self) -> None:
        snapshot = self._scheduler.snapshot()
        if self._scheduler.output or self._accepted or snapshot != self._last:
            accepted, self._accepted, self._last = self._accepted, 0, snapshot
            self._deliver(self._scheduler.take_output(), snapshot, accepted)

    def _iterate(self) -> None:
        """Take commands, launch a step when it is time, and wait for one once `depth` are in flight
        or no other can be launched.

        It is time shortly before the step in flight can end: requests that arrive until then join
        the next step instead of the one after it.
        """
        now = self._clock()
        self._take_commands(now)
        if self._launched and (left := self._scheduler.remaining_s(now) - self._lead.seconds) > 0.0:
            self._scheduler.admit(now)
            self._publish()
            self._inbox.wait(left)
            return
        batch = self._scheduler.plan(now)
        if batch is None or self._executor.depth == 1:  # else the device comes first
            self._publish()
        if batch is not None:
            self._launch(batch, now)
            if len(self._launched) == self._executor.depth:
                self._land()
        elif self._launched:
            self._land()
        else:
            self._check_leaks()
            if self._cores is not None:
                self._cores.release()
            self._inbox.wait(max(0.0, self._scheduler.next_deadline() - self._clock()))

    def _check_leaks(self) -> None:
        """Log leaked blocks: the worker goes on with less room."""
        leaked, before = self._scheduler.num_leaked_blocks(), self._num_leaked_blocks
        self._num_leaked_blocks = leaked
        if leaked > before:
            log.error("KV blocks are held without a request", extra={"blocks": leaked})

    def _launch(self, batch: StepBatch, now: float) -> None:
        if self._step_started is None:
            self._step_started = time.monotonic()
        if self._cores is not None:
            self._executor.use_threads(self._cores.take())
        self._expected_s = max(self._expected_s, self._executor.token_s * batch.num_tokens)
        self._launching, self._first_layer = True, None
        pending = self._executor.launch(batch)
        self._launching, ended = False, self._clock()
        first = ended if self._first_layer is None else self._first_layer
        self._lead.launched(first_s=first - now, whole_s=ended - now)
        self._launched.append(pending)
        self._scheduler.launched(pending.number)
        if self._executor.depth > 1 or self._scheduler.output:  # hand-offs proceed beside the step
            self._publish()

    def _land_over(self) -> None:
        """Land a step that has ended while the host launches the next one, 20 ms if it is large."""
        if self._first_layer is None:
            self._first_layer = self._clock()
        if self._launched and self._launched[0].is_over:
            self._land()

    def _land(self) -> None:
        result = self._launched[0].wait()
        self._launched.popleft()
        self._lead.landed(result.device_s)
        now = self._clock()
        if self._step_started is not None:
            self._expected_s = max(self._expected_s, time.monotonic() - self._step_started)
        self._step_started = time.monotonic() if self._launched or self._launching else None
        self.steps += 1
        self.last_step_end = now
        self._scheduler.apply(result, now)
        self._publish()
