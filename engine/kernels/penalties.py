"""Changes of logits before sampling: biases, then penalties.

The order is vLLM's: tokens that are banned, logit_bias, repetition penalty (as transformers'
RepetitionPenaltyLogitsProcessor), frequency and presence penalty (as OpenAI defines them); then
come temperature, top-k, top-p and min-p. All of it is in float32 and changes each (row, token)
once, so results are equal on every device and in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.batch import SequenceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Biases and penalties of a step's rows, as flat lists of (row, token) entries on the host.

    bias_at: int64 `[2, b]`, rows and tokens; bias: float32 `[b]`. seen_at: int64 `[2, s]`, the
    tokens that penalties apply to; seen: float32 `[4, s]`: count of the token in the output, and
    repetition, frequency and presence penalty of the row.
    """

    bias_at: Tensor
    bias: Tensor
    seen_at: Tensor
    seen: Tensor

    @staticmethod
    def build(steps: Sequence[SequenceStep], *, pinned: bool = False) -> Penalties | None:
        """From one sampled sequence per row; None without any. `pinned`: for copies to a GPU."""
        rows = [
            (row, step, params)
            for row, step in enumerate(steps)
            if (params := step.sampling) and (step.seen or params.logit_bias)
        ]
        if not rows:
            return None
        # By numpy: thousands per row are too many for lists, and too few for torch's threads, which
        # may have to wait for a core.
        numbers = chain.from_iterable(chain.from_iterable(p.logit_bias for _, _, p in rows))
        pairs = np.fromiter(numbers, np.float64).reshape(-1, 2)
        tokens = np.frombuffer(b"".join(step.seen for _, step, _ in rows), np.int32)
        bias_at, seen_at = (np.empty((2, len(of)), np.int64) for of in (pairs, tokens))
        bias_at[1], seen_at[1] = pairs[:, 0], tokens
        seen = np.empty((4, len(tokens)), np.float32)
        seen[0] = np.frombuffer(b"".join(step.counts for _, step, _ in rows), np.int32)
        biased = penalised = 0
        for row, step, p in rows:
            bias_at[0, slice(biased, biased := biased + len(p.logit_bias))] = row
            part = slice(penalised, penalised := penalised + len(step.seen) // 4)
            seen_at[0, part] = row
            seen[1:, part] = [[p.repetition_penalty], [p.frequency_penalty], [p.presence_penalty]]
        parts = map(torch.from_numpy, (bias_at, pairs[:, 1].astype(np.float32), seen_at, seen))
        at, values, looked, table = (part.pin_memory() if pinned else part for part in parts)
        return Penalties(bias_at=at, bias=values, seen_at=looked, seen=table)

    def apply(self, logits: Tensor) -> None:
        """Change `logits` `[rows, vocabulary]`, float32, in place. Does not wait for the device."""
        device = logits.device
        if self.bias.shape[0]:
            rows, tokens = self.bias_at.to(device, non_blocking=True)
            logits[rows, tokens] += self.bias.to(device, non_blocking=True)
        if self.seen.shape[1]:
            rows, tokens = self.seen_at.to(device, non_blocking=True)
            count, repetition, frequency, presence = self.seen.to(device, non_blocking=True)
            value = logits[rows, tokens]
            value = torch.where(value > 0, value / repetition, value * repetition)
            logits[rows, tokens] = value - frequency * count - presence * (count > 0)
