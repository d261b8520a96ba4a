"""Joins a pure scheduler to the step loop and to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.batch import StepBatch, StepResult
from protocol.errors import ErrorInfo, Internal
from protocol.messages import WorkerLoad
from worker_runtime.shell import Snapshot

C = TypeVar("C")
O = TypeVar("O")


class Scheduler(Protocol[C, O]):
    """What both schedulers are to their driver."""

    def handle(self, command: C, now: float, out: O) -> None: ...

    def plan(self, now: float, out: O) -> StepBatch | None: ...

    def apply(self, result: StepResult, now: float, out: O) -> None: ...

    def fail_all(self, error: ErrorInfo, out: O) -> None: ...

    def load(self) -> WorkerLoad: ...

    def next_deadline(self) -> float | None: ...

    def counters(self) -> dict[str, int]: ...

    @property
    def num_unfinished(self) -> int: ...


#: Takes one turn's output, what the scheduler is like after it, and how many requests it took in.
Deliver = Callable[[O, Snapshot, int], None]


class SchedulerDriver(Generic[C, O]):
    """Collects what the scheduler decides in a turn and hands it to the event loop in one call."""

    def __init__(
        self,
        scheduler: Scheduler[C, O],
        *,
        new_output: Callable[[], O],
        is_submit: Callable[[C], bool],
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver[O],
    ) -> None:
        self._scheduler = scheduler
        self._new_output = new_output
        self._is_submit = is_submit
        self._loop = loop
        self._deliver = deliver
        self._out = new_output()
        self._accepted = 0
        self._last = Snapshot()

    def handle(self, command: C, now: float) -> None:
        """Take one command in."""
        if self._is_submit(command):
            self._accepted += 1
        self._scheduler.handle(command, now, self._out)

    def plan(self, now: float) -> StepBatch | None:
        """The next step."""
        return self._scheduler.plan(now, self._out)

    def apply(self, result: StepResult, now: float) -> None:
        """Take the step's tokens in."""
        self._scheduler.apply(result, now, self._out)

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._scheduler.next_deadline()

    def fail_all(self, error: Exception) -> None:
        """End every request with a typed error."""
        info = Internal(f"the engine broke: {type(error).__name__}: {error}").info()
        self._scheduler.fail_all(info, self._out)

    def publish(self) -> None:
        """Hand the turn over, unless nothing has happened."""
        snapshot = Snapshot(
            load=self._scheduler.load(),
            num_unfinished=self._scheduler.num_unfinished,
            counters=self._scheduler.counters(),
        )
        if not self._out and not self._accepted and snapshot == self._last:
            return
        out, accepted = self._out, self._accepted
        self._out, self._accepted, self._last = self._new_output(), 0, snapshot
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, out, snapshot, accepted)
