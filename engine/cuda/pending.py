"""Steps that were submitted: their results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import StepResult
from engine.cuda.plan import StepPlan
from engine.cuda.staging import StagingRing, StepTimer, copied_size, copy
from engine.errors import RankLost
from engine.kernels.logprobs import LogprobRows
from protocol.sampling import TokenLogprobs

#: Steps whose results may be on their way.
_DEPTH = 4


class ResultBuffers:
    """Pinned memory for what every step gives back, and its time on the device.

    A buffer holds the sampled tokens, which rows of a step with chunks are not finite, and whether
    a peer stayed silent: int32, each from a multiple of COPIED_WORDS on.
    """

    def __init__(self, rows: int, chunk_rows: int, device: torch.device) -> None:
        """At most `rows` tokens, `chunk_rows` rows in a step with chunks."""
        self._damaged = copied_size(rows)
        self._failed = self._damaged + copied_size(chunk_rows)
        self._ring = StagingRing(self._failed + copied_size(1), _DEPTH, device)
        self._timer = StepTimer(_DEPTH, device)

    def begin(self) -> None:
        """A step is about to be queued on the current stream."""
        self._timer.begin()

    def fetch(
        self,
        plan: StepPlan,
        *,
        tokens: Tensor,
        damaged: Tensor | None,
        failed: Tensor | None,
        logprobs: Tensor | None,
        scores: Tensor | None,
        watch: Callable[[], None] | None,
        number: int,
    ) -> PendingTokens:
        """Queue the copies of the step's results behind it. `logprobs` and `scores` are tables that
        are being copied already."""
        buffer, view, index = self._ring.take()
        if plan.sampled:
            copy(tokens, buffer, len(plan.sampled))
        if damaged is not None and plan.layout is not None:
            copy(damaged, buffer[self._damaged :], plan.layout.rows)
        view[self._failed] = 0
        if failed is not None:
            copy(failed, buffer[self._failed :], 1)
        timed = self._timer.end()
        self._ring.sent(index)
        return PendingTokens(self, index, timed, plan, logprobs, scores, watch, number)

    def wait(self, index: int, watch: Callable[[], None] | None) -> None:
        """Block until the results in buffer `index` are there; `watch` may raise meanwhile."""
        self._ring.wait(index, watch)

    def is_over(self, index: int) -> bool:
        """Whether `wait` would not block."""
        return self._ring.is_over(index)

    def tokens(self, index: int, count: int) -> list[int]:
        """The first `count` sampled tokens; -1 where logits are not finite."""
        found: list[int] = self._ring.view(index)[:count].tolist()
        return found

    def damaged(self, index: int, first: int, end: int) -> bool:
        """Whether one of these rows of a step with chunks is not finite."""
        return bool(self._ring.view(index)[self._damaged + first : self._damaged + end].any())

    def failed(self, index: int) -> bool:
        """Whether an all-reduce gave up waiting, in this step or an earlier one."""
        return bool(self._ring.view(index)[self._failed])

    def seconds(self, timed: int) -> float:
        """Of a step that is over, on the device; 0 when unknown."""
        return self._timer.seconds(timed)


@dataclass(slots=True)
class PendingTokens:
    """A step on its way; its results are in buffer `index`."""

    results: ResultBuffers
    index: int
    timed: int
    plan: StepPlan
    logprobs: Tensor | None
    scores: Tensor | None
    watch: Callable[[], None] | None
    number: int

    def wait(self) -> StepResult:
        """Block until the step is over; its KV is written then, too.

        Raises RankLost when another rank is gone or its GPU stayed silent.
        """
        self.results.wait(self.index, self.watch)
        self.check_peers()
        plan = self.plan
        sampled = self.results.tokens(self.index, len(plan.sampled))
        tokens = tuple(None if row is None else sampled[row] for row in plan.results)
        logprobs = _read(plan.logprobs, self.logprobs)
        return StepResult(
            non_finite=self._non_finite(tokens),
            tokens=tokens,
            logprobs={index: entry for index, (entry,) in logprobs.items()},
            target_logprobs=_read(plan.scored, self.scores),
            device_s=self.results.seconds(self.timed),
        )

    def _non_finite(self, tokens: tuple[int | None, ...]) -> frozenset[int]:
        """Sequences whose logits are not finite, or rows of whose chunk are not in the input of the
        last layer."""
        found = {index for index, token in enumerate(tokens) if token == -1}
        plan, layout = self.plan, self.plan.layout
        if layout is not None and self.results.damaged(self.index, 0, layout.rows):
            chunks = zip(plan.chunk_order, plan.chunks, layout.first_rows, strict=True)
            found |= {
                index
                for index, step, first in chunks
                if self.results.damaged(self.index, first, first + len(step.tokens))
            }
        return frozenset(found)

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block."""
        return self.results.is_over(self.index)

    def check_peers(self) -> None:
        """Raise RankLost when a step, this or an earlier one, gave up waiting for a peer's sums."""
        if self.results.failed(self.index):
            raise RankLost("a rank's GPU stayed silent in an all-reduce", param="tp")


def _read(rows: LogprobRows | None, table: Tensor | None) -> dict[int, tuple[TokenLogprobs, ...]]:
    return {} if rows is None or table is None else rows.read(table)
