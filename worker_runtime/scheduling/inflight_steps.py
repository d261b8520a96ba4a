"""Steps of one scheduler that were launched and have not landed: their tokens are not known."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.batch import StepBatch
from observability.clock import Rate
from worker_runtime.scheduling.entry import SchedulerEntry
from worker_runtime.scheduling.sequence import Sequence
from worker_runtime.scheduling.step_model import StepModel, StepWork

#: Share of the shortest time that a step may take which is relied on: where the device measures its
#: steps, and where the loop does. A loop that looks at a step late finds that it took long: far
#: below one, such times do not confirm themselves.
_RELIABLE_SHARE = 0.97
_OBSERVED_SHARE = 0.75
#: Latest steps with prompts whose time is compared with what was predicted.
_COMPARED = 8
#: Decode-only steps remembered for the prediction, and how many of the shortest are ignored: where
#: the host looks late, one step seems long and the next one short. The device knows better.
_HISTORY = 16
_OUTLIERS = 4


E = TypeVar("E", bound=SchedulerEntry)


@dataclass(frozen=True, slots=True)
class Row(Generic[E]):
    """One sequence's part in a step: how many of its tokens run, and whether it samples one.

    `names` are those of the blocks it computes that other sequences could share.
    """

    entry: E
    num_tokens: int
    samples: bool
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class _InflightStep(Generic[E]):
    """shape: None without prompt tokens. predicted_s: 0 when unknown. timed: whether it counts for
    the rate that the worker reports."""

    rows: list[Row[E]]
    num_tokens: int
    launched_at: float
    shape: StepWork | None
    predicted_s: float
    timed: bool

    @property
    def decodes_only(self) -> bool:
        return self.shape is None


class InflightSteps(Generic[E]):
    """Launched steps, oldest first. At most one may be in flight when the next one is launched."""

    def __init__(self, step_rows: tuple[int, ...] = ()) -> None:
        """step_rows: see `StepModel`."""
        self._steps: deque[_InflightStep[E]] = deque()
        self._names: Counter[bytes] = Counter()  # of blocks that steps in flight compute
        self._claimed: set[bytes] = set()  # of blocks in the step being planned
        self._landed_at = -math.inf
        self.model = StepModel(step_rows)
        self._rate = Rate()
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_HISTORY)  # rows, seconds
        self._shortest_decode = math.inf
        self._ratios: deque[float] = deque(maxlen=_COMPARED)  # measured over predicted seconds
        self._by_device = False  # who measured the last step
        #: When the newest step should end; None when unknown.
        self.ends_at: float | None = None

    def claim(self, sequence: Sequence, names: list[bytes]) -> bool:
        """Have the step being planned compute the blocks `names`. False when another sequence
        computes the first of them, in that step or in flight: waiting for its KV is cheaper."""
        first = names[0] if names and not sequence.in_flight else None
        if first in self._claimed or first in self._names:
            return False
        self._claimed.update(names)
        return True

    def launch(self, rows: list[Row[E]], now: float, *, timed: bool = True) -> StepBatch | None:
        """Put the planned step `rows` in flight; None without rows."""
        self._claimed.clear()
        if not rows:
            return None
        num_tokens = sum(row.num_tokens for row in rows)
        shape = None if num_tokens == len(rows) else _shape(rows)
        predicted_s = self.model.predict(shape) if shape and self.model.known else 0.0
        begins_at = now
        if self._steps:  # none is before it
            running = self._steps[-1]
            begins_at = max(now, running.predicted_s + max(running.launched_at, self._landed_at))
        self.ends_at = begins_at + predicted_s if predicted_s else None
        self._steps.append(_InflightStep(rows, num_tokens, now, shape, predicted_s, timed))
        for row in rows:
            if row.names:  # most have none, and updating with nothing is slow
                self._names.update(row.names)
        return StepBatch(
            sequences=tuple(
                row.entry.sequence.launch(row.num_tokens, samples=row.samples, row=number)
                for number, row in enumerate(rows)
            )
        )

    @property
    def newest(self) -> list[Row[E]]:
        """The rows of the step launched last, which must not have landed."""
        return self._steps[-1].rows

    def land(self, now: float, device_s: float = 0.0) -> list[Row[E]]:
        """Take the oldest step out of flight: its rows, in the order of the batch. `device_s`:
        seconds that it took on a device that measures them."""
        step = self._steps.popleft()
        for row in step.rows:
            row.entry.sequence.land(row.num_tokens)
            for name in row.names:
                self._names[name] -= 1
                if not self._names[name]:
                    del self._names[name]
        self._measure(step, now, device_s)
        return step.rows

    def passed(self, now: float) -> None:
        """A step of another scheduler on the same engine has landed."""
        self._landed_at = now

    @property
    def free_at(self) -> float:
        """When the steps in flight should have ended; 0 without any, and when unknown."""
        return self.ends_at or 0.0 if self._steps else 0.0

    def rows(self) -> Iterator[Row[E]]:
        return (row for step in self._steps for row in step.rows)

    def remaining_s(self, now: float) -> float:
        """Seconds for which the newest step in flight surely runs on; not positive when unknown."""
        if not self._steps:
            return 0.0
        step = self._steps[-1]
        if step.decodes_only:
            times = sorted(s * min(1.0, step.num_tokens / n) for n, s in self._decodes)
            shortest = times[_OUTLIERS] if len(times) > _OUTLIERS else 0.0
            if self._by_device and shortest:
                shortest = _RELIABLE_SHARE * times[0]
        else:
            share = _RELIABLE_SHARE if self._by_device else _OBSERVED_SHARE
            shortest = share * min(self._ratios, default=0.0) * step.predicted_s
        began = max(step.launched_at, self._landed_at)
        return began + shortest - now if now >= began else 0.0  # the clock was set back

    def tokens_per_second(self) -> float:
        """Smoothed over the time of timed steps; 0 before the first."""
        return self._rate.per_second()

    def prompt_s(self, start: int, end: int, chunk: int) -> float:
        """Seconds to compute tokens start .. end - 1 of a prompt in chunks of so many; 0 when
        unknown."""
        if not self.model.known:
            return 0.0
        count = end - start
        work = StepWork(num_prompt_tokens=count, num_pairs=count * start + count * count // 2)
        num_more = max(0, -(-count // chunk) - 1)
        return self.model.predict(work) + num_more * self.model.predict(StepWork())

    def decode_step_s(self) -> float:
        """Seconds of a step without prompt tokens: the median of the latest ones while steps run,
        else the shortest so far; 0 before the first."""
        if not self._decodes:
            return 0.0
        if not self._steps:
            return self._shortest_decode
        return sorted(seconds for _, seconds in self._decodes)[len(self._decodes) // 2]

    def _measure(self, step: _InflightStep[E], now: float, device_s: float) -> None:
        # Steps run one after the other: one launched early began when the one before ended.
        # Never negative, for a clock that is set back.
        seconds = device_s or max(0.0, now - max(step.launched_at, self._landed_at))
        self._by_device = device_s > 0.0
        if step.timed:
            self._rate.add(step.num_tokens, seconds)
        if step.shape is None:
            self._decodes.append((step.num_tokens, seconds))
            self._shortest_decode = min(self._shortest_decode, seconds)
        else:
            if step.predicted_s:
                self._ratios.append(seconds / step.predicted_s)
            self.model.add(step.shape, seconds)
        self._landed_at = now


def _shape(rows: list[Row[E]]) -> StepWork:
    """What these rows run, before their sequences are launched."""
    num_decodes = context = num_prompt_tokens = num_pairs = 0
    for row in rows:
        start, count = row.entry.sequence.num_launched, row.num_tokens
        if count == 1:
            num_decodes += 1
            context += start
        else:
            num_prompt_tokens += count
            num_pairs += count * start + count * count // 2
    return StepWork(
        num_decodes=num_decodes,
        context=context,
        num_prompt_tokens=num_prompt_tokens,
        num_pairs=num_pairs,
    )
