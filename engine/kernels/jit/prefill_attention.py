# mypy: ignore-errors
"""Causal attention of packed prompt chunks over their paged context (FlashAttention-2 order)."""

import triton
import triton.language as tl


@triton.jit
def attend_tiles(
    q,
    q_at,
    acc,
    peak,
    total,
    table,
    head_pool,
    begin,
    end,
    length,
    scale,
    dims,
    dim_ok,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the context tokens begin .. end into the running softmax; MASKED applies causality."""
    page_size: tl.constexpr = PAGE * DIM
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = at + tl.arange(0, TILE)
        if MASKED:
            block = tl.load(table + tokens // PAGE, mask=tokens < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + tokens // PAGE).to(tl.int64)
        cell = head_pool + block * (2 * KV_HEADS * page_size) + (tokens % PAGE) * DIM
        k_mask = dim_ok[:, None] & (tokens < length)[None, :]
        v_mask = dim_ok[None, :] & (tokens < length)[:, None]
        k_at = cell[None, :] + dims[:, None]
        v_at = cell[:, None] + KV_HEADS * page_size + dims[None, :]
        if MASKED or dims.shape[0] != DIM:
            k = tl.load(k_at, mask=k_mask, other=0.0)
        else:
            k = tl.load(k_at)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            score = tl.where(tokens[None, :] <= q_at[:, None], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        if MASKED or dims.shape[0] != DIM:
            v = tl.load(v_at, mask=v_mask, other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def paged_prefill(
    q,
    q_stride,
    pool,
    first_rows,
    starts,
    counts,
    indptr,
    blocks,
    out,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (query tile, head, sequence). q is rotated and the new KV is in the pool already.

    Sequence s has counts[s] new tokens at rows first_rows[s] .., absolute positions starts[s] ...
    The longest query tiles are issued first, so that the tail of the launch is short.
    """
    seq = tl.program_id(2)
    head = tl.program_id(1)
    count = tl.load(counts + seq)
    tile = tl.cdiv(count, BLOCK_M) - 1 - tl.program_id(0)
    if tile >= 0:
        start = tl.load(starts + seq)
        table = blocks + tl.load(indptr + seq)
        local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q_at = start + local
        dims = tl.arange(0, DIM_P)
        dim_ok = dims < DIM
        rows = (tl.load(first_rows + seq) + local).to(tl.int64)
        q_mask = (local < count)[:, None] & dim_ok[None, :]
        at = head * DIM + dims[None, :]
        query = tl.load(q + rows[:, None] * q_stride + at, mask=q_mask, other=0.0)
        head_pool = pool + (head // (HEADS // KV_HEADS)) * (PAGE * DIM)
        length = tl.minimum(start + (tile + 1) * BLOCK_M, start + count)
        full = (start + tile * BLOCK_M) // TILE * TILE
        acc = tl.zeros([BLOCK_M, DIM_P], tl.float32)
        peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        log2_scale = scale * 1.4426950408889634
        acc, peak, total = attend_tiles(
            query, q_at, acc, peak, total, table, head_pool, 0, full, length, log2_scale,
            dims, dim_ok, KV_HEADS, DIM, PAGE, TILE, False, STAGES, PRECISION,
        )  # fmt: skip
        acc, peak, total = attend_tiles(
            query, q_at, acc, peak, total, table, head_pool, full, length, length, log2_scale,
            dims, dim_ok, KV_HEADS, DIM, PAGE, TILE, True, STAGES, PRECISION,
        )  # fmt: skip
        acc = acc / total[:, None]
        tl.store(out + rows[:, None] * out_stride + at, acc.to(out.dtype.element_ty), mask=q_mask)
