"""Allowed tokens of a row, as bits over the vocabulary (structured output)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CHUNK = 4096


def mask_bytes(vocab_size: int) -> int:
    """Length of a mask: one bit per id, in whole 32-bit words."""
    return -(-vocab_size // 32) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The masked rows of a step.

    rows: int64 `[m]`, which rows of the logits; words: int32 `[m, words]`, bit i & 31 of word
    i >> 5 says whether id i may be chosen. Every row leaves at least one id.
    """

    rows: Tensor
    words: Tensor

    @staticmethod
    def build(allowed: Sequence[bytes | None], *, pinned: bool = False) -> TokenMasks | None:
        """From one mask per row, None for all ids; None when no row has a mask."""
        rows = [row for row, mask in enumerate(allowed) if mask is not None]
        if not rows:
            return None
        packed = np.frombuffer(b"".join(filter(None, allowed)), dtype="<i4").copy()
        words = torch.from_numpy(packed).view(len(rows), -1)
        return TokenMasks(
            rows=torch.tensor(rows, pin_memory=pinned),
            words=words.pin_memory() if pinned else words,
        )

    def apply(self, logits: Tensor, *, first_id: int = 0) -> None:
        """Set logits of other ids to -inf, in place. `logits` `[rows, n]` begin at id first_id."""
        if logits.is_cuda:
            device = logits.device
            rows = self.rows.to(device, non_blocking=True)
            mask_on_device(logits, rows, self.words.to(device, non_blocking=True), first_id)
            return
        last_id = first_id + logits.shape[1]
        for row, words in zip(self.rows.tolist(), self.words.numpy(), strict=True):
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[first_id:last_id]
            logits[row].masked_fill_(torch.from_numpy(bits == 0), -torch.inf)


def mask_on_device(logits: Tensor, rows: Tensor, words: Tensor, first_id: int) -> None:
    """`TokenMasks.apply` as one kernel; every tensor is on the device of `logits`."""
    # Only here: an engine on a CPU needs no triton.
    import triton

    from engine.kernels.jit.masks import mask_rows

    grid = (rows.shape[0], triton.cdiv(logits.shape[1], _CHUNK))
    mask_rows[grid](
        logits,
        logits.stride(0),
        rows,
        words,
        words.shape[1],
        logits.shape[1],
        first_id,
        BLOCK=_CHUNK,
        num_warps=4,
    )
