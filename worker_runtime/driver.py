"""Joins a pure scheduler to the step loop and to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from engine.batch import StepBatch, StepResult
from protocol.errors import ErrorInfo, Internal
from protocol.messages import WorkerLoad
from worker_runtime.shell import Snapshot

C = TypeVar("C")
Out = TypeVar("Out")
CIn = TypeVar("CIn", contravariant=True)
OutIn = TypeVar("OutIn", contravariant=True)


class Scheduler(Protocol[CIn, OutIn]):
    """What both schedulers are to their driver."""

    def handle(self, command: CIn, now: float, out: OutIn) -> None:
        """Take one command in."""
        ...

    def plan(self, now: float, out: OutIn) -> StepBatch | None:
        """The next step, or None."""
        ...

    def launched(self, step: int, out: OutIn) -> None:
        """The planned step runs under this number; 0 when it is over."""
        ...

    def apply(self, result: StepResult, now: float, out: OutIn) -> None:
        """Take a step's tokens in."""
        ...

    def lasts(self, now: float) -> float:
        """For how long the step on its way is sure to run on."""
        ...

    def admit(self, now: float, out: OutIn) -> None:
        """Give what has come in what it can have before the next plan."""
        ...

    def fail_all(self, error: ErrorInfo, out: OutIn) -> None:
        """End every request with `error`."""
        ...

    def load(self) -> WorkerLoad:
        """Figures for the routers."""
        ...

    def next_deadline(self) -> float | None:
        """When to look again."""
        ...

    def cache_changes(self) -> Mapping[bytes, bool]:
        """Digests that have come or gone since the last call."""
        ...

    def counters(self) -> dict[str, int]:
        """How requests ended."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests still here."""
        ...


#: Takes one turn's output, what the scheduler is like after it, and how many requests it took in.
Deliver = Callable[[Out, Snapshot, int], None]


class SchedulerDriver(Generic[C, Out]):
    """Collects what the scheduler decides in a turn and hands it to the event loop in one call."""

    def __init__(
        self,
        scheduler: Scheduler[C, Out],
        *,
        new_output: Callable[[], Out],
        is_submit: Callable[[C], bool],
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver[Out],
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

    def launched(self, step: int) -> None:
        """Hand over at once what can go on beside the step."""
        self._scheduler.launched(step, self._out)
        if self._out:
            self.publish()

    def apply(self, result: StepResult, now: float) -> None:
        """Take the step's tokens in."""
        self._scheduler.apply(result, now, self._out)

    def lasts(self, now: float) -> float:
        """For how long the step on its way is sure to run on."""
        return self._scheduler.lasts(now)

    def admit(self, now: float) -> None:
        """Give what has come in what it can have before the next plan."""
        self._scheduler.admit(now, self._out)

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
            cache=self._scheduler.cache_changes(),
        )
        if not self._out and not self._accepted and snapshot == self._last:
            return
        out, accepted = self._out, self._accepted
        self._out, self._accepted, self._last = self._new_output(), 0, snapshot
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, out, snapshot, accepted)
