"""Typed wrappers of the row-wise triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.activation import Activation
from engine.kernels.jit import elementwise
from engine.kernels.triton.launch import Repeated, ceil_div, power_of_2

_RMS_NORM = Repeated(elementwise.rms_norm)
_MARK_DAMAGED = Repeated(elementwise.mark_damaged)
_COPY_WORDS = Repeated(elementwise.copy_words)
_ADD_NORMED = Repeated(elementwise.add_normed)
_NORM_PARTS = Repeated(elementwise.norm_parts)
_GATED_PRODUCT = Repeated(elementwise.gated_product)
_CAP_LOGITS = Repeated(elementwise.cap_logits)
_ROPE_WRITE = Repeated(elementwise.rope_write)
_EMBED = Repeated(elementwise.embed)


#: Words that `copy_words` moves at a time.
COPIED_WORDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of each query head and of each key head: weights `[dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


def norm_arguments(
    norms: HeadNorms | None, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Gains and epsilon as kernels take them, a tensor that they do not read where there are
    none."""
    return (unused, unused, 0.0) if norms is None else (norms.q, norms.k, norms.eps)


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
    block = power_of_2(hidden)
    _RMS_NORM[(rows,)](
        x,
        gain,
        out,
        eps,
        hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=_row_warps(block),
        **launch_options(pdl),
    )


def _row_warps(block: int) -> int:
    return min(16, max(1, block // 1024)) if block > 1024 else 4


def mark_damaged(x: torch.Tensor, *, flags: torch.Tensor) -> None:
    """flags int32 `[rows]`: whether a row of x `[rows, width]` has NaN or infinities."""
    rows, width = x.shape
    block = power_of_2(width)
    _MARK_DAMAGED[(rows,)](x, flags, width, BLOCK=block, num_warps=_row_warps(block))


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """target = source: int32 `[n]`, n a multiple of COPIED_WORDS; either may be pinned memory of
    the host.

    A copy engine would take such a copy only after all that is queued there, KV of other memories
    for example; a kernel waits for its stream alone.
    """
    _COPY_WORDS[(target.numel() // COPIED_WORDS,)](source, target, BLOCK=COPIED_WORDS, num_warps=4)


def add_normed(
    y: torch.Tensor,
    post_gain: torch.Tensor,
    h: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    *,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """h += rms(y) * post_gain over rows `[tokens, hidden]`; with a gain, out = rms(h) * gain."""
    rows, hidden = h.shape
    block = power_of_2(hidden)
    _ADD_NORMED[(rows,)](
        y,
        post_gain,
        h,
        post_gain if gain is None else gain,
        out,
        eps,
        hidden,
        BLOCK=block,
        NEXT=gain is not None,
        PDL=pdl,
        num_warps=8 if rows <= _FEW_ROWS and block > 1024 else _row_warps(block),
        **launch_options(pdl),
    )


#: Rows that do not fill a card: more warps each.
_FEW_ROWS = 64


def norm_parts(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    totals: tuple[int, int],
    *,
    write: bool = False,
    read: bool = False,
) -> None:
    """RMS norm of the queries and of the keys of rows of qkv over all heads, in place.

    The gains are as wide as this rank's heads; totals: widths of all ranks' queries and keys, of
    which `squares` float32 `[rows, 2]` holds the sums of squares with `read`. `write` leaves this
    rank's there and norms nothing.
    """
    rows, width = qkv.shape
    _NORM_PARTS[(rows, 2)](
        qkv,
        q_gain,
        k_gain,
        squares,
        eps,
        width,
        q_gain.shape[0],
        k_gain.shape[0],
        *totals,
        BLOCK=power_of_2(max(q_gain.shape[0], k_gain.shape[0])),
        WRITE=write,
        READ=read,
        num_warps=4,
    )


def gated_product(
    gate_up: torch.Tensor,
    *,
    out: torch.Tensor,
    activation: Activation = Activation.SILU,
    pdl: bool = False,
) -> None:
    """out `[tokens, width]` = act(left half) * right half of gate_up `[tokens, 2 width]`."""
    rows, width = out.shape
    block = 1024 if rows < 1024 else 4096
    block = min(block, power_of_2(width))
    _GATED_PRODUCT[(rows, ceil_div(width, block))](
        gate_up,
        out,
        width,
        BLOCK=block,
        GELU=activation is Activation.GELU_TANH,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """Contiguous logits `[rows, ids]` = cap * tanh(logits / cap)."""
    rows, width = logits.shape
    block = min(4096, power_of_2(width))
    _CAP_LOGITS[(rows, ceil_div(width, block))](logits, width, BLOCK=block, CAP=cap)


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Rotate q and k of qkv `[rows, (heads + 2 kv_heads) * dim]` in place; write k, v to the pool.

    Only the first rows, as many as there are positions, are tokens. norms: of each head before.

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
        *norm_arguments(norms, cos),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        HEADS_P=power_of_2(num_heads),
        KV_HEADS_P=power_of_2(kv_heads),
        HALF_P=power_of_2(dim // 2),
        NORM=norms is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def embed(
    tokens: torch.Tensor,
    feed: torch.Tensor,
    previous: torch.Tensor,
    table: torch.Tensor,
    first_id: int,
    *,
    out: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Rows of the (vocabulary slice of the) table times `scale`; ids held by other ranks give zero
    rows.

    Where feed[r] >= 0 the id is previous[feed[r]], a token sampled on the device a step ago;
    otherwise it is tokens[r].
    """
    rows, hidden = out.shape
    block = min(2048, power_of_2(hidden))
    _EMBED[(rows, ceil_div(hidden, block))](
        tokens,
        feed,
        previous,
        table,
        out,
        first_id,
        table.shape[0],
        hidden,
        scale,
        BLOCK=block,
    )
