"""The last part of a step: from logits to tokens that stay on the device for the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.comm import RankCollectives
from engine.cuda.inputs import DecodeInputs
from engine.cuda.model import RankShape
from engine.cuda.plan import StepPlan
from engine.cuda.staging import copied_size, to_device
from engine.kernels.triton.sampling import RowSampling, SamplingScratch, pick_best, sample


class TokenSampler:
    """Samples up to `rows` rows; `tokens` int32 `[rows or more]` holds the last step's results."""

    def __init__(self, rows: int, vocab_size: int, shape: RankShape, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = shape
        self._device = device
        self._scratch = SamplingScratch(rows, vocab_size, device)
        self._candidates = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(copied_size(rows), dtype=torch.int32, device=device)

    def __call__(
        self, logits: Tensor, plan: StepPlan, inputs: DecodeInputs, comm: RankCollectives
    ) -> Tensor | None:
        """Sample the tokens of `logits` `[sampled rows, rows of this rank's head]`, equal on every
        rank. Returns the table of their log-probabilities where the plan asks for them.

        Where nothing but noise is added, each rank looks at its own ids, and only the best of each
        meet.
        """
        count = len(plan.sampled)
        sampling = inputs.sampling(count, plan.filtered)
        tokens = self.tokens[:count]
        whole = plan.filtered or plan.banned or plan.penalties or plan.logprobs
        if comm.size > 1 and not whole:
            ours = logits[:, : self._shape.num_ids]
            if plan.masks is not None:
                plan.masks.apply(ours, first_id=self._shape.first_id)
            self._sample_apart(ours, sampling, tokens, comm)
            return None
        raw = self.whole(logits, comm)
        logits = self._change(raw, plan)
        sample(logits, sampling, self._scratch, out=tokens)
        return self._logprobs(raw, tokens, plan)

    def whole(self, logits: Tensor, comm: RankCollectives) -> Tensor:
        """Logits of the whole vocabulary, from those of each rank's ids."""
        if comm.size > 1:
            logits = comm.gather(logits).transpose(0, 1).flatten(1)
        return logits[:, : self._vocab_size]

    def _change(self, logits: Tensor, plan: StepPlan) -> Tensor:
        """What is sampled from; `logits` stay as they are where log-probabilities are wanted."""
        if not (plan.banned or plan.penalties or plan.masks):
            return logits
        if plan.logprobs is not None:
            logits = logits.clone()
        if plan.banned:
            pairs = to_device(torch.tensor(plan.banned), self._device)
            logits[pairs[:, 0], pairs[:, 1]] = -torch.inf
        if plan.penalties is not None:
            logits = logits.float()
            plan.penalties.apply(logits)
        if plan.masks is not None:
            plan.masks.apply(logits)
        return logits

    def _logprobs(self, raw: Tensor, tokens: Tensor, plan: StepPlan) -> Tensor | None:
        if plan.logprobs is None:
            return None
        rows = to_device(plan.logprobs.rows, self._device)
        chosen = tokens[rows].long().clamp(min=0)  # -1: the row is not finite
        return plan.logprobs.table(lambda part: raw[rows[part]], chosen)

    def _sample_apart(
        self, logits: Tensor, sampling: RowSampling, tokens: Tensor, comm: RankCollectives
    ) -> None:
        count = tokens.shape[0]
        ours = self._candidates[: 2 * count].view(2, count)
        sample(
            logits,
            sampling,
            self._scratch,
            out=ours[0],
            values=ours[1].view(torch.float32),
            first_id=self._shape.first_id,
        )
        pick_best(comm.gather(ours), out=tokens)
