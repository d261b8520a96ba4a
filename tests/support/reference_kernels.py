"""Readable operations in plain torch: the oracle of every faster implementation.

Shapes as in engine.kernels.base. Arithmetic is in float32; results have the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm x / sqrt(mean(x^2) + eps) * weight over each row (Zhang and Sennrich, 2019)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def rope_and_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor, num_q_heads: int
) -> Tensor:
    """Rotate q and k, write k and v at `slots`, return the rotated q `[T, Q, D]`.

    qkv: `[T, (Q + 2 K) D]`, heads in the order q, k, v. cos, sin: `[T, D / 2]` of each row's
    position. The halves of a head turn against each other (Llama's "rotate_half" convention).
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, 0, :, offsets] = _rotate(k, cos, sin)
    kv[blocks, 1, :, offsets] = v
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    contexts: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of every row over its own sequence's KV, or the window's: `[T, Q D]`.

    q: `[T, Q, D]`, rows of sequence s at query_starts[s] .. query_starts[s + 1]; its last row is at
    position contexts[s] - 1. block_table: `[S, blocks]`, the blocks of each sequence in order.
    """
    out = torch.empty_like(q)
    for s, context in enumerate(contexts.tolist()):
        first, last = int(query_starts[s]), int(query_starts[s + 1])
        k, v = _sequence_kv(kv, block_table[s], context)
        group = q.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("tqd,qld->qtl", q[first:last].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(context - (last - first), context, device=q.device)
        future = torch.arange(context, device=q.device)[None, :] > positions[:, None]
        if window is not None:
            future |= torch.arange(context, device=q.device)[None, :] <= positions[:, None] - window
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("qtl,qld->tqd", weights, v).to(q.dtype)
    return out.flatten(1)


def _sequence_kv(kv: Tensor, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, float32 `[K, context, D]`."""
    needed = -(-context // kv.shape[3])
    pages = kv[blocks[:needed]].float()
    flat = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return flat[0], flat[1]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `[T, 2 I]`, gate first (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)
