"""Typed wrapper of the sampling kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.jit.sampling import pick_rank, sample_rows, sampling_floor
from engine.kernels.triton.launch import ceil_div, power_of_2

_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How each row is sampled, on the device.

    temperature: float32, 0 for greedy; top_k: int32, 0 for off; top_p, min_p: float32; keys: int32
    `[rows, 2]`, engine.kernels.sampling.noise_key of (seed, position); filtered: whether any row
    needs top_k, top_p or min_p.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor
    filtered: bool


class SamplingScratch:
    """Best candidates of each chunk of the vocabulary, for up to `rows` rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        chunks = ceil_div(vocab_size, _CHUNK)
        self.values = torch.empty(rows * chunks, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows * chunks, dtype=torch.int32, device=device)
        self.best = torch.empty(rows, dtype=torch.float32, device=device)
        self.floors = torch.empty(rows, dtype=torch.float32, device=device)
        self.counters = torch.zeros(rows, dtype=torch.int32, device=device)


def sample(
    logits: torch.Tensor,
    sampling: RowSampling,
    scratch: SamplingScratch,
    *,
    out: torch.Tensor,
    values: torch.Tensor | None = None,
    first_id: int = 0,
) -> None:
    """out `[rows]` int32: the next token of each row of `logits` `[rows, vocabulary]`; -1 where any
    of them is NaN or +inf.

    With a part of the vocabulary, that of ids first_id onwards, it is the best of that part, and
    `values` `[rows]` float32 gets what it is to be compared by.

    The result of a row depends on its logits, its parameters and its key alone, and is the one that
    engine.kernels.sampling.sample gives for the same logits.
    """
    rows, vocab_size = logits.shape
    if sampling.filtered:
        sampling_floor[(rows,)](
            logits,
            logits.stride(0),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            scratch.floors,
            vocab_size,
            BLOCK=_CHUNK,
            num_warps=16,
        )
    chunks = ceil_div(vocab_size, _CHUNK)
    sample_rows[(rows, chunks)](
        logits,
        logits.stride(0),
        sampling.temperature,
        sampling.keys,
        scratch.floors,
        scratch.values,
        scratch.ids,
        scratch.counters,
        out,
        scratch.best if values is None else values,
        vocab_size,
        first_id,
        CHUNKS=chunks,
        CHUNKS_P=power_of_2(chunks),
        BLOCK=_CHUNK,
        FILTERED=sampling.filtered,
        num_warps=8,
    )


def pick_best(gathered: torch.Tensor, *, out: torch.Tensor) -> None:
    """out `[rows]`: the best of all ranks' tokens. gathered: int32 `[ranks, 2, rows]`, ids and then
    the bits of their float32 values."""
    ranks, _, rows = gathered.shape
    pick_rank[(rows,)](gathered, out, rows, RANKS=ranks, RANKS_P=power_of_2(ranks), num_warps=1)
