"""Changes of logits before anything is chosen from them: biases, then penalties.

The order is vLLM's: tokens that are banned, logit_bias, repetition penalty (as transformers'
RepetitionPenaltyLogitsProcessor), frequency and presence penalty (as OpenAI defines them); then
come temperature, top-k, top-p and min-p. Everything is in float32 and touches each (row, token)
once, so the result is the same on every device and in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import SequenceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Biases and penalties of a step's rows, as flat lists of (row, token) entries on the host.

    bias_at: int64 `[2, b]`, rows and tokens; bias: float32 `[b]`. seen_at: int64 `[2, s]`, the
    tokens that the penalties of a row look at; seen: float32 `[4, s]`: how often the token is in
    the output, and the row's repetition, frequency and presence penalty.
    """

    bias_at: Tensor
    bias: Tensor
    seen_at: Tensor
    seen: Tensor

    @staticmethod
    def build(steps: Sequence[SequenceStep], *, pinned: bool = False) -> Penalties | None:
        """Of one sampled sequence a row; None without any. `pinned`: for a copy to a GPU."""
        rows = [
            (row, step, params)
            for row, step in enumerate(steps)
            if (params := step.sampling) and (step.seen or params.logit_bias)
        ]
        if not rows:
            return None
        biases = [(row, *pair) for row, _, params in rows for pair in params.logit_bias]
        seen = [(row, step, params) for row, step, params in rows if step.seen]
        bias = torch.tensor(biases, dtype=torch.float64).reshape(len(biases), 3).t()
        owners = torch.tensor([row for row, _, _ in seen], dtype=torch.int64)
        factors = torch.tensor(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in seen],
            dtype=torch.float32,
        ).reshape(len(seen), 3)
        sizes = torch.tensor([len(step.seen) // 4 for _, step, _ in seen], dtype=torch.int64)
        tokens = _unpacked(step.seen for _, step, _ in seen)
        counts = _unpacked(step.counts for _, step, _ in seen)
        parts = (
            bias[:2].long(),
            bias[2].float(),
            torch.stack((owners.repeat_interleave(sizes), tokens.long())),
            torch.cat((counts.float()[None], factors.repeat_interleave(sizes, dim=0).t())),
        )
        bias_at, values, seen_at, table = (p.pin_memory() if pinned else p for p in parts)
        return Penalties(bias_at=bias_at, bias=values, seen_at=seen_at, seen=table)

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


def _unpacked(parts: Iterable[bytes]) -> Tensor:
    """int32, one part after the other."""
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.int32).copy())
