# mypy: ignore-errors
"""Causal attention of prompt chunks over their paged context (FlashAttention-2 order), from a list
of query tiles. The context of a tile may be cut into parts, merged by the part that ends last."""

import triton
import triton.language as tl

from engine.kernels.jit.codes import read_as
from engine.kernels.jit.elementwise import capped


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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold context tokens begin .. end into the running softmax; MASKED applies causality and the
    WINDOW, if any, and leaves out tokens from `length` on."""
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
        score = tl.dot(q, read_as(k, q.dtype), input_precision=PRECISION)
        if SOFTCAP > 0.0:
            score = capped(score * scale, SOFTCAP) * 1.4426950408889634
        else:
            score *= scale * 1.4426950408889634
        if MASKED:
            visible = (tokens[None, :] <= q_at[:, None]) & (tokens < length)[None, :]
            if WINDOW:
                visible &= tokens[None, :] > q_at[:, None] - WINDOW
            score = tl.where(visible, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        if MASKED and WINDOW:  # a query may see nothing of the first tiles
            new_peak = tl.maximum(new_peak, -1e30)
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        if MASKED or dims.shape[0] != DIM:
            v = tl.load(v_at, mask=v_mask, other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(
            weight.to(q.dtype),
            read_as(v, q.dtype),
            acc * shrink[:, None],
            input_precision=PRECISION,
        )
        peak = new_peak
    return acc, peak, total


@triton.jit
def merge_context_parts(
    partial,
    stats,
    slot,
    parts,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM_P: tl.constexpr,
):
    """The softmax-weighted sum of a tile's parts, always in the same order; its (acc, total).

    slot: the row of the first part's scratch for this head; those of the next parts follow HEADS
    apart.
    """
    local = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_P)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for part in range(parts):
        row = (slot + part * HEADS) * BLOCK_M + local
        peak = tl.maximum(peak, tl.load(stats + row * 2, cache_modifier=".cg"))
    acc = tl.zeros([BLOCK_M, DIM_P], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in range(parts):
        row = (slot + part * HEADS) * BLOCK_M + local
        weight = tl.exp2(tl.load(stats + row * 2, cache_modifier=".cg") - peak)
        total += tl.load(stats + row * 2 + 1, cache_modifier=".cg") * weight
        cells = partial + row.to(tl.int64)[:, None] * DIM_P + dims[None, :]
        acc += tl.load(cells, cache_modifier=".cg") * weight[:, None]
    return acc, total


@triton.jit
def paged_prefill(
    q,
    q_stride,
    pool,
    tiles,
    blocks,
    out,
    out_stride,
    partial,
    stats,
    counters,
    counts,
    lse,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (head, tile) of attention. q is rotated and the new KV is in the pool already.

    A tile is FIELDS integers: row of its first query, queries (0: no tile), position of the first
    query, where block 0 of its sequence would be in `blocks`, the context tokens begin .. end to
    attend to, and with SPLIT: scratch slot of the tile's first part, number of this part, number of
    parts. The last part of a tile holds the token of its first query; with a WINDOW `begin` is not
    before what that query sees. With LSE, the natural logarithm of each row's softmax sum goes to
    lse `[row, HEADS]`. MIXED: only the first counts[0] tiles count.
    """
    head = tl.program_id(0)
    at = tiles + tl.program_id(1) * FIELDS
    count = tl.load(at + 1)
    if MIXED:
        count = tl.where(tl.program_id(1) < tl.load(counts), count, 0)
    if count > 0:
        first = tl.load(at)
        start = tl.load(at + 2)
        table = blocks + tl.load(at + 3)
        begin = tl.load(at + 4)
        end = tl.load(at + 5)
        local = tl.arange(0, BLOCK_M)
        q_at = start + local
        dims = tl.arange(0, DIM_P)
        dim_ok = dims < DIM
        rows = (first + local).to(tl.int64)
        inside = (local < count)[:, None] & dim_ok[None, :]
        column = head * DIM + dims[None, :]
        query = tl.load(q + rows[:, None] * q_stride + column, mask=inside, other=0.0)
        head_pool = pool + (head // (HEADS // KV_HEADS)) * (PAGE * DIM)
        full = begin + tl.maximum(tl.minimum(start, end) - begin, 0) // TILE * TILE
        acc = tl.zeros([BLOCK_M, DIM_P], tl.float32)
        peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW:  # tiles that the last query does not see whole
            left = tl.cdiv(tl.maximum(start + count - WINDOW - begin, 0), TILE) * TILE
            left = tl.minimum(begin + left, full)
            acc, peak, total = attend_tiles(
                query, q_at, acc, peak, total, table, head_pool, begin, left, end, scale, dims,
                dim_ok, KV_HEADS, DIM, PAGE, TILE, True, WINDOW, SOFTCAP, STAGES, PRECISION,
            )  # fmt: skip
            begin = left
        acc, peak, total = attend_tiles(
            query, q_at, acc, peak, total, table, head_pool, begin, full, end, scale, dims,
            dim_ok, KV_HEADS, DIM, PAGE, TILE, False, WINDOW, SOFTCAP, STAGES, PRECISION,
        )  # fmt: skip
        acc, peak, total = attend_tiles(
            query, q_at, acc, peak, total, table, head_pool, full, end, end, scale, dims,
            dim_ok, KV_HEADS, DIM, PAGE, TILE, True, WINDOW, SOFTCAP, STAGES, PRECISION,
        )  # fmt: skip
        if LSE:
            sums = (peak + tl.log2(total)) * 0.6931471805599453
            tl.store(lse + rows * HEADS + head, sums, mask=local < count)
        whole = count > 0
        if SPLIT:
            parts = tl.load(at + 8)
            if parts > 1:
                slot = tl.load(at + 6) * HEADS + head
                row = (slot + tl.load(at + 7) * HEADS) * BLOCK_M + local
                cells = partial + row.to(tl.int64)[:, None] * DIM_P + dims[None, :]
                tl.store(cells, acc)
                tl.store(stats + row * 2, peak)
                tl.store(stats + row * 2 + 1, total)
                tl.debug_barrier()
                done = tl.atomic_add(counters + slot, 1, sem="acq_rel", scope="gpu")
                whole = done == parts - 1
                if whole:
                    acc, total = merge_context_parts(
                        partial, stats, slot, parts, HEADS, BLOCK_M, DIM_P
                    )
                    tl.store(counters + slot, 0)
        if whole:
            if WINDOW:  # rows behind the last query may have seen nothing
                total = tl.where(local < count, total, 1.0)
            value = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + rows[:, None] * out_stride + column, value, mask=inside)


@triton.jit
def gather_history(
    pool, blocks, out, PLANES: tl.constexpr, CELLS: tl.constexpr, CELLS_P: tl.constexpr
):
    """One page of one plane (k or v of a KV head): out `[PLANES, pages, CELLS]` = those of `blocks`
    in pool `[block, PLANES, CELLS]`."""
    page = tl.program_id(0)
    plane = tl.program_id(1)
    block = tl.load(blocks + page).to(tl.int64)
    cells = tl.arange(0, CELLS_P)
    ok = cells < CELLS
    value = tl.load(pool + (block * PLANES + plane) * CELLS + cells, mask=ok)
    value = value.to(tl.float32).to(out.dtype.element_ty)
    place = plane.to(tl.int64) * tl.num_programs(0) + page
    tl.store(out + place * CELLS + cells, value, mask=ok)


@triton.jit
def merge_attention(
    acc,
    acc_lse,
    part,
    part_row,
    part_head,
    lse,
    lse_row,
    lse_head,
    out,
    out_stride,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """One row: fold attention to a part of the context, with its softmax sums, into float32
    acc `[rows, HEADS, DIM]`; LAST writes the whole to out instead. FIRST: acc holds nothing yet."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_P)
    dims = tl.arange(0, DIM_P)
    head_ok = heads < HEADS
    ok = head_ok[:, None] & (dims < DIM)[None, :]
    value = tl.load(part + row * part_row + heads[:, None] * part_head + dims[None, :], mask=ok)
    value = value.to(tl.float32)
    total = tl.load(lse + row * lse_row + heads * lse_head, mask=head_ok, other=0.0)
    cells = acc + (row * HEADS + heads)[:, None] * DIM + dims[None, :]
    if not FIRST:
        before = tl.load(acc_lse + row * HEADS + heads, mask=head_ok, other=0.0)
        peak = tl.maximum(before, total)
        old, new = tl.exp(before - peak), tl.exp(total - peak)
        value = (
            tl.load(cells, mask=ok) * (old / (old + new))[:, None]
            + value * (new / (old + new))[:, None]
        )
        total = peak + tl.log(old + new)
    if LAST:
        at = out + row * out_stride + heads[:, None] * DIM + dims[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=ok)
    else:
        tl.store(cells, value, mask=ok)
        tl.store(acc_lse + row * HEADS + heads, total, mask=head_ok)
