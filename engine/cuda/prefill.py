"""Attention of prompt chunks: the fastest backend for each sequence of a step.

cuDNN is about twice as fast as the triton kernel on Hopper, but wants contiguous keys and a plan
per length. So it serves long chunks that start at position 0, one call a sequence (or one for all,
when they are equally long): their keys lie in the projection's own rows, and a call may run past
the end of its sequence, for causality keeps later keys out and later rows are dropped. Lengths are
rounded up, so that few plans exist; each thread makes its own before it runs steps. Everything else
(short chunks, history, other head sizes, float32) goes through the paged kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.layout import DENSE_STEP, DENSE_TOKENS, ChunkRows, dense_length
from engine.kernels.triton.attention import prefill_attention


def cudnn_serves(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether cuDNN's attention can be used for this kind of model on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim > 128 or head_dim % 8 or not torch.backends.cudnn.is_available():
        return False
    version = torch.backends.cudnn.version() or 0
    return version >= 90500 and torch.cuda.get_device_capability(device) >= (9, 0)


class ChunkAttention:
    """Causal attention of packed chunks, one layer at a time."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._scale = scale

    def __call__(
        self, qkv: Tensor, pool: Tensor, chunks: ChunkRows, out: Tensor | None = None
    ) -> Tensor:
        """`[tokens, heads * dim]`, in `out` if all chunks are packed; rows are rotated, and their
        KV is in the pool.

        qkv: the chunks' rows, then `chunks.padding` finite ones.
        """
        tokens = chunks.positions.shape[0]
        if chunks.packed is None:
            if len(chunks.dense) == 1:
                return self._dense(qkv, *chunks.dense[0])
            length = dense_length(chunks.dense[0][1])
            if all(count == length for _, count in chunks.dense):
                return self._batch(qkv[:tokens], length)
        if out is None:
            out = qkv.new_empty(tokens, self._num_heads * self._head_dim)
        if chunks.packed is not None:
            prefill_attention(
                qkv, pool, chunks.packed, num_heads=self._num_heads, scale=self._scale, out=out
            )
        for first, count in chunks.dense:
            out[first : first + count] = self._dense(qkv, first, count)
        return out

    def _dense(self, qkv: Tensor, first: int, count: int) -> Tensor:
        length = dense_length(count)
        return self._batch(qkv[first : first + length], length)[:count]

    def _batch(self, qkv: Tensor, length: int) -> Tensor:
        """Attention of as many sequences of `length` rows as qkv holds."""
        heads = qkv.view(-1, length, qkv.shape[1] // self._head_dim, self._head_dim).transpose(1, 2)
        q, k, v = heads.split((self._num_heads, self._kv_heads, self._kv_heads), dim=1)
        attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, True, False, scale=self._scale
        )[0]
        return attended.transpose(1, 2).reshape(qkv.shape[0], -1)

    def make_plans(
        self, max_tokens: int, max_prompts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Have cuDNN plan all that steps of up to `max_tokens` can ask of it, in which at most
        `max_prompts` are equally long. For this thread: torch keeps the plans of each apart."""
        longest = dense_length(max_tokens)
        width = (self._num_heads + 2 * self._kv_heads) * self._head_dim
        qkv = torch.zeros(longest, width, dtype=dtype, device=device)
        for length in range(DENSE_TOKENS, longest + 1, DENSE_STEP):
            for count in range(1, min(max_prompts, longest // length) + 1):
                self._batch(qkv[: count * length], length)
