# mypy: ignore-errors
"""Masks of tokens on the device: engine.kernels.sampling."""

import triton
import triton.language as tl


@triton.jit
def mask_rows(logits, stride, rows, words, W, V, first_id, BLOCK: tl.constexpr):
    """logits[rows[m], at] = -inf where bit (first_id + at) of words[m] is 0.

    logits: any float `[.., V]`, the ids from first_id on; words: int32 `[masks, W]`.
    """
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first_id + at
    word = tl.load(words + index * W + (token >> 5), mask=at < V, other=-1)
    row = logits + tl.load(rows + index) * stride
    tl.store(row + at, -float("inf"), mask=((word >> (token & 31)) & 1) == 0)
