"""A step that was submitted: its results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.batch import StepResult
from engine.cuda.plan import StepPlan
from engine.cuda.staging import StagingRing
from engine.errors import RankLost
from engine.kernels.logprobs import LogprobRows
from protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class PendingTokens:
    """A step on its way: its tokens, tables of log-probabilities, and which rows of a step with
    chunks are not finite, are being copied to the host."""

    ring: StagingRing
    buffer: Tensor
    index: int
    plan: StepPlan
    logprobs: Tensor | None
    scores: Tensor | None
    damaged: Tensor | None
    watch: Callable[[], None] | None
    number: int

    def wait(self) -> StepResult:
        """Block until the step is over; its KV is written then, too.

        Raises RankLost when another rank is gone or its GPU stayed silent.
        """
        self.ring.wait(self.index, self.watch)
        self.check_peers()
        *sampled, _ = self.buffer.tolist()
        plan = self.plan
        tokens = tuple(None if row is None else sampled[row] for row in plan.results)
        logprobs = _read(plan.logprobs, self.logprobs)
        return StepResult(
            non_finite=self._non_finite(tokens),
            tokens=tokens,
            logprobs={index: entry for index, (entry,) in logprobs.items()},
            target_logprobs=_read(plan.scored, self.scores),
        )

    def _non_finite(self, tokens: tuple[int | None, ...]) -> frozenset[int]:
        """Sequences whose logits are not finite, or rows of whose chunk are not in the input of the
        last layer."""
        found = {index for index, token in enumerate(tokens) if token == -1}
        layout = self.plan.layout
        if self.damaged is not None and layout is not None and self.damaged.any():
            firsts = layout.first_rows
            chunks = zip(self.plan.chunk_order, self.plan.chunks, firsts, strict=True)
            found |= {
                index
                for index, step, first in chunks
                if self.damaged[first : first + len(step.tokens)].any()
            }
        return frozenset(found)

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block."""
        return self.ring.is_over(self.index)

    def check_peers(self) -> None:
        """Raise RankLost when a step, this or an earlier one, gave up waiting for a peer's sums."""
        if self.buffer[-1]:
            raise RankLost("a rank's GPU stayed silent in an all-reduce", param="tp")


def _read(rows: LogprobRows | None, table: Tensor | None) -> dict[int, tuple[TokenLogprobs, ...]]:
    return {} if rows is None or table is None else rows.read(table)
