"""Typed wrappers of the row-wise triton kernels."""

from __future__ import annotations

import torch
import triton

from engine.kernels.jit import elementwise
from engine.kernels.triton.launch import Repeated

_RMS_NORM = Repeated(elementwise.rms_norm)
_HEAD_NORM = Repeated(elementwise.head_norm)
_SILU_MUL = Repeated(elementwise.silu_mul)
_ROPE_WRITE = Repeated(elementwise.rope_write)
_EMBED = Repeated(elementwise.embed)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Launch keywords that let a kernel start while its predecessor drains (Hopper and later)."""
    return {"launch_pdl": True} if pdl else {}


def rms_norm(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """out = rms(x) * gain over rows `[tokens, hidden]`."""
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _RMS_NORM[(rows,)](
        x,
        gain,
        out,
        eps,
        hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(16, max(1, block // 1024)) if block > 1024 else 4,
        **launch_options(pdl),
    )


def head_norm(
    qkv: torch.Tensor, q_gain: torch.Tensor, k_gain: torch.Tensor, eps: float, *, num_heads: int
) -> None:
    """RMS norm of each query and key head of qkv `[rows, (heads + 2 kv_heads) * dim]`, in place."""
    rows, width = qkv.shape
    dim = q_gain.shape[0]
    normed = (width // dim + num_heads) // 2  # heads + kv_heads
    _HEAD_NORM[(rows, normed)](
        qkv,
        q_gain,
        k_gain,
        eps,
        width,
        HEADS=num_heads,
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        num_warps=1,
    )


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor, pdl: bool = False) -> None:
    """out `[tokens, width]` = silu(left half) * right half of gate_up `[tokens, 2 width]`."""
    rows, width = out.shape
    block = 1024 if rows < 1024 else 4096
    block = min(block, triton.next_power_of_2(width))
    _SILU_MUL[(rows, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl)
    )


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    num_heads: int,
) -> None:
    """Rotate q and k of qkv `[rows, (heads + 2 kv_heads) * dim]` in place; write k, v to the pool.

    Only the first rows, as many as there are positions, are tokens.

    pool: one layer, `[block, 2, kv_heads, page, dim]`; slots: block * page + offset per token,
    negative for padding; cos, sin: float32 `[positions, dim / 2]`.
    """
    _, _, kv_heads, page, dim = pool.shape
    _ROPE_WRITE[(positions.shape[0],)](
        qkv,
        cos,
        sin,
        positions,
        slots,
        pool,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        HEADS_P=triton.next_power_of_2(num_heads),
        KV_HEADS_P=triton.next_power_of_2(kv_heads),
        DIM_P=triton.next_power_of_2(dim),
        num_warps=4,
    )


def embed(
    tokens: torch.Tensor,
    feed: torch.Tensor,
    previous: torch.Tensor,
    table: torch.Tensor,
    first_id: int,
    *,
    out: torch.Tensor,
) -> None:
    """Rows of the (vocabulary slice of the) table; ids held by other ranks give zero rows.

    Where feed[r] >= 0 the id is previous[feed[r]], a token sampled on the device a step ago;
    otherwise it is tokens[r].
    """
    rows, hidden = out.shape
    block = min(2048, triton.next_power_of_2(hidden))
    _EMBED[(rows, triton.cdiv(hidden, block))](
        tokens,
        feed,
        previous,
        table,
        out,
        first_id,
        table.shape[0],
        hidden,
        BLOCK=block,
    )
