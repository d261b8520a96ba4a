"""Log-probabilities of chosen tokens and of the likeliest alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from engine.batch import SequenceStep
from protocol.sampling import LOWEST_LOGPROB, TokenLogprobs

#: Rows of logits in memory at once, however many prompt tokens are scored.
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows of a step whose log-probabilities are wanted.

    parts: (batch index, number of rows, number of likeliest tokens) of each sequence, in row order.
    rows: indices among the sampled or the scored rows. targets: token of each row, where it is
    known before the step. Host tensors, int64.
    """

    parts: tuple[tuple[int, int, int], ...]
    rows: Tensor
    targets: Tensor

    @staticmethod
    def of_sampled(sampled: Sequence[tuple[int, SequenceStep]]) -> LogprobRows | None:
        """Of sampled sequences, given with their batch indices in row order; None if none asks."""
        wanted = [
            (row, (index, 1, step.sampling.logprobs))
            for row, (index, step) in enumerate(sampled)
            if step.sampling is not None and step.sampling.logprobs is not None
        ]
        if not wanted:
            return None
        return LogprobRows(
            parts=tuple(part for _, part in wanted),
            rows=torch.tensor([row for row, _ in wanted]),
            targets=torch.empty(0, dtype=torch.int64),
        )

    @staticmethod
    def of_targets(steps: Sequence[tuple[int, SequenceStep]]) -> LogprobRows | None:
        """Of prompt targets, given with batch indices in row order; None without targets."""
        parts = [(i, len(step.targets), step.num_top) for i, step in steps if step.targets]
        if not parts:
            return None
        targets = torch.tensor([token for _, step in steps for token in step.targets])
        return LogprobRows(parts=tuple(parts), rows=torch.arange(targets.shape[0]), targets=targets)

    @property
    def num_top(self) -> int:
        return max(count for _, _, count in self.parts)

    def table(self, logits: Callable[[slice], Tensor | None], tokens: Tensor) -> Tensor | None:
        """Their `logprob_table`, on the device of `tokens` `[rows]`. `logits(part)` returns the
        logits of a slice of the rows, or None on a rank without whole logits; then None."""
        tables = []
        for first in range(0, self.rows.shape[0], ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            values = logits(part)
            if values is not None:
                tables.append(logprob_table(values, tokens[part], self.num_top))
        return torch.cat(tables) if tables else None

    def read(self, table: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Each sequence's part of a table on the host, cut to the alternatives it wants."""
        counts = [count for _, size, want in self.parts for count in repeat(want, size)]
        width = (table.shape[1] - 2) // 2
        entries = map(_entry, table.tolist(), counts, repeat(width))
        return {index: tuple(next(entries) for _ in range(size)) for index, size, _ in self.parts}


def logprob_table(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """float32 `[rows, 2 + 2 * num_top]`: log-probability and rank of each token, then the highest
    log-probabilities in order, then their ids. Ids and ranks are exact in float32.

    logits: `[rows, vocabulary]`, not modified; tokens: int64 `[rows]`. Does not wait for the
    device.
    """
    values = logits.float()
    chosen = values.gather(1, tokens[:, None])
    rank = (values > chosen).sum(dim=-1, keepdim=True) + 1
    top, ids = values.topk(min(num_top, values.shape[1]), dim=-1)
    logprobs = torch.cat((chosen, top), dim=1) - values.logsumexp(dim=-1, keepdim=True)
    logprobs = logprobs.nan_to_num(LOWEST_LOGPROB, 0.0, LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
    return torch.cat((logprobs[:, :1], rank.float(), logprobs[:, 1:], ids.float()), dim=1)


def _entry(row: list[float], count: int, width: int) -> TokenLogprobs:
    count = min(count, width)
    return TokenLogprobs(
        logprob=row[0],
        rank=int(row[1]),
        top_logprobs=tuple(row[2 : 2 + count]),
        top_ids=tuple(map(int, row[2 + width : 2 + width + count])),
    )
