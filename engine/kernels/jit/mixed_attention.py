# mypy: ignore-errors
"""Attention of a step that mixes decode rows with prompt chunks, by launches of a fixed grid: the
work of their programs is read from device memory, so that a CUDA graph serves every mix."""

import triton
import triton.language as tl

from engine.kernels.jit.decode_attention import attend_split
from engine.kernels.jit.elementwise import pdl_wait
from engine.kernels.jit.prefill_attention import attend_chunk_tile


@triton.jit
def mixed_chunks(
    qkv,
    pool,
    counts,
    tiles,
    blocks,
    out,
    partial,
    stats,
    counters,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (head, tile) of the first counts[0] tiles; see `paged_prefill`. The chunks' rows of qkv
    `[rows, (HEADS + 2 KV_HEADS) * DIM]` are rotated, and their KV is in the pool."""
    program = tl.program_id(0)
    pdl_wait(PDL)
    if program < tl.load(counts) * HEADS:
        attend_chunk_tile(
            program % HEADS, tiles + program // HEADS * FIELDS, qkv, (HEADS + 2 * KV_HEADS) * DIM,
            pool, blocks, out, HEADS * DIM, partial, stats, counters, stats, scale, HEADS,
            KV_HEADS, DIM, DIM_P, PAGE, BLOCK_M, TILE, True, False, STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def mixed_decodes(
    qkv,
    cos_table,
    sin_table,
    pool,
    counts,
    indptr,
    blocks,
    lengths,
    out,
    partial,
    stats,
    counters,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE_P: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (KV head, row, split) of the first counts[1] rows of qkv, which are not yet rotated, with
    counts[2] splits of at least counts[3] tiles; see `paged_decode`."""
    program = tl.program_id(0)
    rows = tl.load(counts + 1)
    splits = tl.load(counts + 2)
    min_tiles = tl.load(counts + 3)
    if program < rows * splits * KV_HEADS:
        attend_split(
            program % KV_HEADS, program // KV_HEADS % rows, program // (KV_HEADS * rows), qkv,
            cos_table, sin_table, pool, indptr, blocks, lengths, out, partial, stats, counters,
            scale, splits, min_tiles, HEADS, KV_HEADS, GROUP, GROUP_P, DIM, DIM_P, PAGE, TILE,
            MERGE_P, MAX_SPLITS, AT_ONCE, False, False, STAGES, False, PRECISION,
        )  # fmt: skip
