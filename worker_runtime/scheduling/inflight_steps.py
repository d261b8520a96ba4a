"""The steps of one scheduler that were launched and have not landed: their tokens are not known."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.batch import StepBatch
from observability.rate import Rate
from worker_runtime.scheduling.sequence import Sequence

#: Part of the shortest time of a step with prompts that is sure to pass; the rest absorbs what a
#: rate gets wrong.
_SURE_SHARE = 0.75
#: Steps shorter than this say nothing about how fast a device can be: host jitter is in them.
_TELLING_S = 0.02
#: Steps of decoding sequences alone that are remembered, and how many of them are taken for shorter
#: than they were: where the host looks late, one step seems long and the next one short.
_REMEMBERED = 16
_OUTLIERS = 4


class HasSequence(Protocol):
    """What a scheduler keeps of a request."""

    sequence: Sequence


E = TypeVar("E", bound=HasSequence)


@dataclass(frozen=True, slots=True)
class Row(Generic[E]):
    """One sequence's part in a step: how many of its tokens run, and whether it samples one.

    `names` are those of the blocks it works at that others could share.
    """

    entry: E
    num_tokens: int
    samples: bool
    names: list[bytes]


class InflightSteps(Generic[E]):
    """Launched steps, oldest first. At most one may be in flight when the next one is launched."""

    def __init__(self) -> None:
        self._steps: deque[tuple[list[Row[E]], float, bool]] = deque()
        self._names: Counter[bytes] = Counter()
        self._claimed: set[bytes] = set()
        self._landed_at = -math.inf
        self._rate = Rate()
        self._fastest = math.inf  # seconds a token, of the fastest step so far
        # Rows and seconds of the last steps of decoding sequences alone.
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def claim(self, sequence: Sequence, names: list[bytes]) -> bool:
        """Take up the blocks of these names in the step being planned. False when another sequence
        works at the first of them, in that step or in flight: its KV is worth waiting for."""
        first = names[0] if names and not sequence.num_in_flight else None
        if first in self._claimed or first in self._names:
            return False
        self._claimed.update(names)
        return True

    def launch(self, rows: list[Row[E]], now: float, *, timed: bool = True) -> StepBatch | None:
        """The step that runs `rows`, which from now on are in flight; None without rows. `timed`:
        whether its rate is one that this worker is to be known by."""
        self._claimed.clear()
        if not rows:
            return None
        self._steps.append((rows, now, timed))
        for row in rows:
            if row.names:  # most have none, and updating with nothing is slow
                self._names.update(row.names)
        return StepBatch(
            sequences=tuple(
                row.entry.sequence.launch(row.num_tokens, samples=row.samples, index=index)
                for index, row in enumerate(rows)
            )
        )

    @property
    def newest(self) -> list[Row[E]]:
        """The rows of the step launched last, which must not have landed."""
        return self._steps[-1][0]

    def land(self, now: float) -> list[Row[E]]:
        """The oldest step is over: its rows, in the order of the batch."""
        rows, launched_at, timed = self._steps.popleft()
        for row in rows:
            row.entry.sequence.land(row.num_tokens, samples=row.samples)
            for name in row.names:
                self._names[name] -= 1
                if not self._names[name]:
                    del self._names[name]
        # Steps run one after the other, so one that was launched early began when the last ended.
        # Never less than nothing: somebody may have set the clock back.
        seconds = max(0.0, now - max(launched_at, self._landed_at))
        tokens = sum(row.num_tokens for row in rows)
        if timed:
            self._rate.add(tokens, seconds)
        if tokens == len(rows):
            self._decodes.append((tokens, seconds))
        if seconds >= _TELLING_S:
            self._fastest = min(self._fastest, seconds / tokens)
        self._landed_at = now
        return rows

    def lasts(self, now: float) -> float:
        """For how long the newest step in flight is sure to run on; not positive when nobody
        knows."""
        if not self._steps:
            return 0.0
        rows, launched_at, _ = self._steps[-1]
        tokens = sum(row.num_tokens for row in rows)
        if tokens == len(rows):
            times = sorted(s * min(1.0, tokens / n) for n, s in self._decodes)
            shortest = times[_OUTLIERS] if len(times) > _OUTLIERS else 0.0
        else:
            shortest = 0.0 if self._fastest is math.inf else _SURE_SHARE * self._fastest * tokens
        began = max(launched_at, self._landed_at)
        return began + shortest - now if now >= began else 0.0  # the clock was set back

    def tokens_per_second(self) -> float:
        """Smoothed over the time of timed steps; 0 before the first."""
        return self._rate.per_second()
