"""The last part of a step: from logits to tokens that stay on the device for the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.comm import Communicator
from engine.cuda.layout import DecodeRows
from engine.cuda.model import RankShape
from engine.cuda.plan import StepPlan
from engine.kernels.triton_sampling import RowSampling, SamplingScratch, pick_best, sample


class TokenSampler:
    """Samples up to `rows` rows; `tokens` int32 `[rows]` holds the last step's results."""

    def __init__(self, rows: int, vocab_size: int, shape: RankShape, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = shape
        self._device = device
        self._scratch = SamplingScratch(rows, vocab_size, device)
        self._candidates = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(
        self, logits: Tensor, plan: StepPlan, rows: DecodeRows, comm: Communicator
    ) -> Tensor:
        """The tokens of `logits` `[sampled rows, rows of this rank's head]`, equal on every rank.

        Where nothing but noise is added, each rank looks at its own ids, and only the best of each
        meet.
        """
        count = len(plan.sampled)
        sampling = rows.sampling(count, plan.filtered)
        tokens = self.tokens[:count]
        changed = plan.banned or plan.penalties is not None
        if comm.size > 1 and not plan.filtered and not changed:
            ours = logits[:, : self._shape.num_ids]
            if plan.masks is not None:
                plan.masks.apply(ours, first_id=self._shape.first_id)
            self._sample_apart(ours, sampling, tokens, comm)
            return tokens
        if comm.size > 1:
            logits = comm.gather(logits).transpose(0, 1).flatten(1)
        logits = logits[:, : self._vocab_size]
        if plan.banned:
            host = torch.tensor(plan.banned, pin_memory=self._device.type == "cuda")
            pairs = host.to(self._device, non_blocking=True)
            logits[pairs[:, 0], pairs[:, 1]] = -torch.inf
        if plan.penalties is not None:
            logits = logits.float()
            plan.penalties.apply(logits)
        if plan.masks is not None:
            plan.masks.apply(logits)
        sample(logits, sampling, self._scratch, out=tokens)
        return tokens

    def _sample_apart(
        self, logits: Tensor, sampling: RowSampling, tokens: Tensor, comm: Communicator
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
