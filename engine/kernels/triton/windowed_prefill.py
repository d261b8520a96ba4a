"""Typed wrapper of attention of a chunk to its own tokens, with a window or without; its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.jit.windowed_prefill import windowed_prefill as kernel
from engine.kernels.triton.attention import ScoreRule
from engine.kernels.triton.launch import Repeated
from engine.kernels.triton.prefill_attention import TILE_FIELDS, ChunkSpan
from engine.kernels.triton.splits import Ints

_WINDOWED_PREFILL = Repeated(kernel)

#: Query rows of a tile, and keys; measured on an H200 (benchmarks/results/engine).
_ROWS, _KEYS = 128, 64
#: Pipeline stages by the size of a head.
_STAGES = {128: 3, 256: 2}
#: Keys that all queries of a tile see have a loop of their own up to this size: 1,100 us become 884
#: (window of 4,096); with 256 dims 289 become 299, for registers are spilt.
_INNER_DIM = 128
#: Tokens up to which it is faster than cuDNN, whose calls are of multiples of 512, on an H200.
_SHORT = 1920


def serves_chunks(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> bool:
    """Whether the kernel takes such heads on this device, which needs Hopper's copy engine."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim in _STAGES
    return fits and heads // kv_heads <= _ROWS


def own_tokens(head_dim: int, max_tokens: int, *, dense: bool) -> int:
    """The longest chunk, of at most `max_tokens`, for whose attention without a window the kernel
    is used where it can be; `dense`: cuDNN's could be, too."""
    if not dense:
        return max_tokens
    return _SHORT if head_dim <= _INNER_DIM else 0


def max_tiles(num_tokens: int, num_chunks: int, group: int) -> int:
    """Tiles of so many chunks together, at most."""
    return num_tokens // max(1, _ROWS // group) + num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Tiles of `windowed_prefill` `[n, TILE_FIELDS]`, the longest first, and what the paged kernel
    has to do."""

    tiles: Ints
    paged: list[ChunkSpan]


def plan_window(
    span: ChunkSpan, window: int, group: int, *, rows: int = _ROWS, keys: int = _KEYS
) -> WindowPlan:
    """Cut a chunk whose heads share KV heads in groups of `group`. Without a window (0) it has no
    history.

    Tokens whose window reaches into the history are left to the paged kernel, as are those at the
    end of a chunk that is so short that a tile of keys would be of another: nothing that is not
    finite there may spoil this one.
    """
    tokens, first = rows // group, 0
    if span.start:
        first = min(span.count, -(-(window - 1) // tokens) * tokens)
    at = np.arange(first, span.count, tokens, dtype=np.int32)
    end = np.minimum(at + tokens, span.count)
    length = -(-(end - np.maximum(at - (window or span.count) + 1, 0)) // keys) * keys
    if not window and span.count >= keys:
        length = np.minimum(length, span.count)
    begin = np.maximum(end - length, 0)
    foreign = begin + length > span.count
    tiles = np.zeros((len(at), TILE_FIELDS), np.int32)
    tiles[:, :3] = np.stack((span.first_row + at, end - at, span.first_row + begin), 1)
    tiles[:, 3] = span.table
    tiles[:, 4] = span.first_row + begin + length
    order = np.argsort(-length, kind="stable")
    short = [(0, first), *zip(at[foreign].tolist(), end[foreign].tolist(), strict=True)]
    return WindowPlan(
        tiles=tiles[order[~foreign[order]]],
        paged=[_part(span, *part) for part in short if part[1]],
    )


def _part(span: ChunkSpan, first: int, end: int) -> ChunkSpan:
    return ChunkSpan(
        first_row=span.first_row + first,
        count=end - first,
        start=span.start + first,
        table=span.table,
    )


def windowed_prefill(
    qkv: torch.Tensor,
    tiles: torch.Tensor,
    rule: ScoreRule,
    *,
    num_heads: int,
    kv_heads: int,
    out: torch.Tensor,
    rows: int = _ROWS,
    keys: int = _KEYS,
) -> None:
    """Attention of the tokens that `tiles` `[n, TILE_FIELDS]` name (`plan_window`).

    qkv: `[rows, (heads + 2 kv_heads) * dim]`, rotated and normed; out: `[rows, heads * dim]`.
    """
    dim = out.shape[1] // num_heads
    _WINDOWED_PREFILL[(kv_heads, tiles.shape[0])](
        qkv,
        qkv.stride(0),
        TensorDescriptor.from_tensor(qkv, [keys, dim]),
        tiles,
        out,
        out.stride(0),
        rule.scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_M=rows,
        TILE=keys,
        FIELDS=TILE_FIELDS,
        STAGES=_STAGES.get(dim, 2),
        INNER=dim <= _INNER_DIM,
        WINDOW=rule.window,
        SOFTCAP=rule.softcap,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=8,
    )
