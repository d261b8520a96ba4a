"""Typed wrapper of attention of prompt chunks on Hopper cards, where the query heads of a KV head
share a tile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import triton

from engine.kernels.triton.attention import ScoreRule
from engine.kernels.triton.elementwise import launch_options
from engine.kernels.triton.prefill_attention import CHUNK_WAVE, TILE_FIELDS, ChunkScratch

kernels: Any = None
with suppress(ImportError, AttributeError):  # Gluon's names change between versions of triton
    from engine.kernels.jit import packed_prefill as kernels

#: Versions of triton that compile the kernel: from the first, below the second.
_VERSIONS = (3, 6), (3, 10)
#: Query rows of a tile; context tokens that are multiplied at once, and tiles of them on their way.
_ROWS, _KEYS, _STAGES = 64, 64, 2
#: Registers of a thread at launch, so that two programs share a multiprocessor; its warps trade.
_REGISTERS = 128
#: Query heads of a KV head, at most: a tile is to hold a few tokens.
_MAX_GROUP = 16


def serves_packed(pool: torch.Tensor, num_heads: int) -> bool:
    """Whether the kernel takes such heads over this pool `[block, 2, kv_heads, page, dim]`, without
    windows or softcaps: it needs Hopper's copy engine and KV that is not quantised."""
    device = pool.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if kernels is None or not _VERSIONS[0] <= version < _VERSIONS[1]:
        return False
    _, _, kv_heads, page, dim = pool.shape
    fits = dim in (64, 128) and page % 8 == 0 and _KEYS % page == 0
    halves = pool.dtype in (torch.bfloat16, torch.float16)
    return fits and halves and num_heads // kv_heads <= _MAX_GROUP


def packed_tokens(num_heads: int, kv_heads: int) -> int:
    """Tokens of a tile."""
    return _ROWS // (num_heads // kv_heads)


def max_packed_tiles(num_tokens: int, num_chunks: int, num_heads: int, kv_heads: int) -> int:
    """Tiles of so many chunks together, at most, where parts are to fill a wave (`plan_tiles`)."""
    whole = num_tokens // packed_tokens(num_heads, kv_heads) + num_chunks
    return CHUNK_WAVE // kv_heads + 2 * whole


def packed_prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    tiles: torch.Tensor,
    blocks: torch.Tensor,
    scratch: ChunkScratch,
    rule: ScoreRule,
    *,
    num_heads: int,
    out: torch.Tensor,
    counts: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Causal attention of every chunk's rotated and normed queries over its paged context.

    As `prefill_attention`, for tiles of at most `packed_tokens` queries, all heads of a KV head in
    one program; counts: int32 whose first is the number of tiles. Programs are as many as the rows
    of q have tiles, or as a wave has: those without a tile would only keep others out.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, _, kv_heads, page, dim = pool.shape
    rows = pool.numel() // dim
    groups = TensorDescriptor(
        pool.view(rows, dim),
        [rows // 8, dim // 64, 8, 64],
        [8 * dim, 64, dim, 1],
        [int(size) for size in kernels.page_box(page, dim)],
        kernels.swizzled(4),
    )
    at_once = -(-q.shape[0] // packed_tokens(num_heads, kv_heads))
    kernels.packed_prefill[(kv_heads, max(1, CHUNK_WAVE // kv_heads, at_once))](
        q,
        q.stride(0),
        groups,
        tiles,
        blocks,
        out,
        out.stride(0),
        scratch.partial,
        scratch.stats,
        scratch.counters,
        counts,
        rule.scale,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        KEYS=_KEYS,
        FIELDS=TILE_FIELDS,
        STAGES=_STAGES,
        PDL=pdl,
        num_warps=4,
        maxnreg=_REGISTERS,
        **launch_options(pdl),
    )
