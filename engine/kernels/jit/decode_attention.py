# mypy: ignore-errors
"""Paged split-KV attention of one new token per sequence, with RoPE and the KV write fused in.

Flash-decoding (Dao et al., 2023): the context is cut into splits that run side by side; the last
split to finish merges the partial results, or a second kernel does where sequences are few.
"""

import triton
import triton.language as tl

from engine.kernels.jit.codes import exact_halves, pair_of_halves
from engine.kernels.jit.elementwise import capped, pdl_wait, rotated


@triton.jit
def active_splits(tiles, splits, min_tiles):
    """How many splits of a context of so many tiles have any."""
    return tl.minimum(splits, tl.cdiv(tiles, min_tiles))


@triton.jit
def new_token(
    qkv_row,
    kvh,
    cos,
    sin,
    dims,
    ok,
    gain,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """The new token's rotated key and its value, `[1, DIM_P]`."""
    one = tl.arange(0, 1)[:, None]
    k_base = qkv_row + (HEADS + kvh) * DIM + one
    v_base = qkv_row + (HEADS + KV_HEADS + kvh) * DIM + one
    k = rotated(k_base, one == 0, cos, sin, dims, ok, gain, eps, DIM // 2, DIM, NORM)
    v = tl.load(v_base + dims[None, :], mask=ok[None, :], other=0.0)
    return k.to(qkv_row.dtype.element_ty), v


@triton.jit
def write_heads(
    value,
    out,
    scales,
    b,
    heads,
    heads_ok,
    dims,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Store value `[heads, DIM_P]` in row b of out `[batch, HEADS * DIM]`; where out is e4m3, as
    codes with a scale [head, STRIDE] for each head."""
    if out.dtype.element_ty.is_fp8():
        largest = tl.max(tl.abs(value), axis=1)
        scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
        tl.store(scales + heads * STRIDE + b, scale, mask=heads_ok)
        value /= scale[:, None]
    cells = out + b.to(tl.int64) * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :]
    ok = heads_ok[:, None] & (dims < DIM)[None, :]
    tl.store(cells, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def merge_splits(
    partial,
    stats,
    first,
    active,
    dims,
    dim_ok,
    GROUP: tl.constexpr,
    MERGE_P: tl.constexpr,
    DIM_P: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The partial outputs of all active splits, weighed by their share of the softmax,
    `[MERGE_P, DIM_P]`.

    The parts of AT_ONCE splits are on their way together: nothing in between waits for one.
    """
    group = tl.arange(0, MERGE_P)
    in_group = group < GROUP
    splits = tl.arange(0, MAX_SPLITS)
    at = (first + splits)[:, None] * GROUP + group[None, :]
    ok = (splits < active)[:, None] & in_group[None, :]
    peaks = tl.load(stats + at * 2, mask=ok, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(stats + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
    peak = tl.where(in_group, tl.max(peaks, axis=0), 0.0)
    total = tl.sum(tl.where(ok, totals * tl.exp2(peaks - peak[None, :]), 0.0), axis=0)
    total = tl.where(in_group, total, 1.0)
    acc = tl.zeros([MERGE_P, DIM_P], tl.float32)
    for base in range(0, active, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = group < tl.where(base + i < active, GROUP, 0)
            at_split = (first + base + i) * GROUP + group
            one = tl.load(
                stats + at_split * 2, mask=there, other=-float("inf"), cache_modifier=".cg"
            )
            part = tl.load(
                partial + at_split[:, None] * DIM_P + dims[None, :],
                mask=there[:, None] & dim_ok[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += part * tl.where(there, tl.exp2(one - peak), 0.0)[:, None]
    return acc / total[:, None]


@triton.jit
def dealt(program, table, KV_HEADS: tl.constexpr):
    """(KV head, row, split, the row's splits, splits before the row's, all splits) of a program of
    a step whose contexts are cut by a table, see `plan_splits`; beyond its end split 1 of none."""
    at = program // KV_HEADS
    total = tl.load(table)
    code = tl.load(table + 1 + at)  # does not wait for `total`: there is memory for all programs
    code = tl.where(at < total, code, 1 << 16)
    split = (code >> 16) & 0xFF
    return program % KV_HEADS, code & 0xFFFF, split, code >> 24, at - split, total


@triton.jit
def attend_context(
    q,
    table,
    head_pool,
    start,
    end,
    scale,
    dims,
    dim_ok,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of q `[rows, DIM_P]` to context tokens start .. end: sums, totals, peaks.

    e4m3 KV becomes float16, with which the card converts it, and so do q and weights: these have no
    fewer bits then, and q that are larger than float16 goes have scores of no use anyway.
    """
    page_size: tl.constexpr = PAGE * DIM
    coded: tl.constexpr = head_pool.dtype.element_ty.is_fp8()
    fast: tl.constexpr = q.dtype == tl.bfloat16
    if coded:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    peak = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1] // (1 + coded)], tl.float32)
    odd = acc
    for at in tl.range(start, end, TILE, num_stages=STAGES):
        tokens = at + tl.arange(0, TILE)
        ok = tokens < end
        block = tl.load(table + tokens // PAGE, mask=ok, other=0).to(tl.int64)
        cell = head_pool + block * (2 * KV_HEADS * page_size) + (tokens % PAGE) * DIM
        k = tl.load(cell[None, :] + dims[:, None], mask=ok[None, :] & dim_ok[:, None], other=0.0)
        if coded:
            k = exact_halves(k, fast)
        score = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP > 0.0:
            score = capped(score * scale, SOFTCAP) * 1.4426950408889634
        else:
            score *= scale * 1.4426950408889634
        score = tl.where(ok[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        values = cell + KV_HEADS * page_size
        if coded:  # two dims at a time: the card transposes 16 bits on their way from memory, not 8
            pairs = tl.arange(0, q.shape[1] // 2)
            both = tl.load(
                values.to(tl.pointer_type(tl.int16))[:, None] + pairs[None, :],
                mask=ok[:, None] & (pairs < DIM // 2)[None, :],
                other=0,
            )
            even_v, odd_v = pair_of_halves(both, fast)
            weight = weight.to(q.dtype)
            acc = tl.dot(weight, even_v, acc * shrink[:, None], input_precision=PRECISION)
            odd = tl.dot(weight, odd_v, odd * shrink[:, None], input_precision=PRECISION)
        else:
            v = tl.load(
                values[:, None] + dims[None, :], mask=ok[:, None] & dim_ok[None, :], other=0.0
            )
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    if coded:
        acc = tl.interleave(acc, odd)
    return acc, total, peak


@triton.jit
def seen_from(length, WINDOW: tl.constexpr):
    """The first token of a context that its last one sees; WINDOW 0: all."""
    return tl.maximum(length - WINDOW, 0) if WINDOW else 0


@triton.jit(do_not_specialize=["splits", "min_tiles"])
def paged_decode(
    qkv,
    cos_table,
    sin_table,
    pool,
    starts,
    blocks,
    lengths,
    out,
    out_scales,
    partial,
    stats,
    counters,
    table_of_splits,
    q_gain,
    k_gain,
    eps,
    scale,
    splits,
    min_tiles,
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
    DEALT: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (KV head, split, sequence) of out[b] = softmax(q k^T * scale) v over a paged context.

    qkv: [batch, (HEADS + 2 KV_HEADS) * DIM], not yet rotated, nor normed by head where NORM;
    pool: [block, 2, KV_HEADS, PAGE, DIM].
    lengths[b] counts the new token; block n of a sequence is blocks[starts[b] + n]. With a WINDOW
    only the last so many tokens are read, and only their blocks have to be there.
    Rows of length 0 are padding: they touch no KV and give zeros. out: [batch, HEADS * DIM], of
    e4m3 with a scale [HEADS, STRIDE] for each head, see `write_heads`.
    DEALT: the splits of a table (`dealt`) are dealt to a grid of one axis, the last split of a row
    merges their results, and rows of out that are not in the table are left alone. Else merge_parts
    merges them.
    """
    kvh = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)  # last: programs without work come after those that have some
    if DEALT:
        kvh, b, split, splits, before, total_splits = dealt(kvh, table_of_splits, KV_HEADS)
    length = tl.load(lengths + b)
    table = blocks + tl.load(starts + b)
    first = seen_from(length, WINDOW)
    tiles = tl.cdiv(length - first, TILE)
    active = active_splits(tiles, splits, min_tiles)
    page_size: tl.constexpr = PAGE * DIM
    head_pool = pool + kvh * page_size
    start = first + split * tiles // tl.maximum(active, 1) * TILE
    end = tl.minimum(length, first + (split + 1) * tiles // tl.maximum(active, 1) * TILE)
    last = tl.maximum(length - 1, 0)
    half: tl.constexpr = DIM // 2
    dims = tl.arange(0, DIM_P)
    dim_ok = dims < DIM
    angle = last.to(tl.int64) * half + tl.where(dims < half, dims, dims - half)
    cos = tl.load(cos_table + angle, mask=dim_ok, other=0.0)
    sin = tl.load(sin_table + angle, mask=dim_ok, other=0.0)
    last_block = tl.load(table + last // PAGE, mask=length > 0, other=0).to(tl.int64)
    pdl_wait(PDL)
    group = tl.arange(0, GROUP_P)
    if length + split == 0:
        write_heads(
            tl.zeros([GROUP_P, DIM_P], tl.float32), out, out_scales, b, kvh * GROUP + group,
            group < GROUP, dims, HEADS, DIM, STRIDE,
        )  # fmt: skip
    if split < active:
        newest = end == length
        qkv_row = qkv + b.to(tl.int64) * (HEADS + 2 * KV_HEADS) * DIM
        q_base = qkv_row + (kvh * GROUP + group)[:, None] * DIM
        q_ok = (group < GROUP)[:, None]
        q = rotated(q_base, q_ok, cos, sin, dims, dim_ok, q_gain, eps, half, DIM, NORM)
        q = q.to(qkv.dtype.element_ty)
        new_ok = dims < tl.where(newest, DIM, 0)
        new_k, new_v = new_token(
            qkv_row, kvh, cos, sin, dims, new_ok, k_gain, eps, HEADS, KV_HEADS, DIM, NORM
        )
        spot = head_pool + last_block * (2 * KV_HEADS * page_size) + (last % PAGE) * DIM
        spot += tl.arange(0, 1)[:, None] + dims[None, :]
        stored: tl.constexpr = pool.dtype.element_ty
        tl.store(spot, new_k.to(tl.float32).to(stored), mask=new_ok[None, :])
        new_v = new_v.to(tl.float32).to(stored)
        tl.store(spot + KV_HEADS * page_size, new_v, mask=new_ok[None, :])
        tl.debug_barrier()
        acc, total, peak = attend_context(
            q, table, head_pool, start, end, scale, dims, dim_ok,
            KV_HEADS, DIM, PAGE, TILE, STAGES, SOFTCAP, PRECISION,
        )  # fmt: skip
        if active == 1:
            write_heads(
                acc / total[:, None], out, out_scales, b, kvh * GROUP + group, group < GROUP,
                dims, HEADS, DIM, STRIDE,
            )  # fmt: skip
        else:
            pair = b * KV_HEADS + kvh
            if DEALT:
                part = kvh * total_splits + before
            else:
                part = pair * splits
            at_group = (part + split) * GROUP + group
            in_group = group < GROUP
            tl.store(
                partial + at_group[:, None] * DIM_P + dims[None, :],
                acc,
                mask=in_group[:, None] & dim_ok[None, :],
            )
            tl.store(stats + at_group * 2, peak, mask=in_group)
            tl.store(stats + at_group * 2 + 1, total, mask=in_group)
            if DEALT:
                tl.debug_barrier()
                finished = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
                if finished == active - 1:
                    merged = merge_splits(
                        partial, stats, part, active, dims, dim_ok,
                        GROUP, MERGE_P, DIM_P, MAX_SPLITS, AT_ONCE,
                    )  # fmt: skip
                    heads = tl.arange(0, MERGE_P)
                    write_heads(
                        merged, out, out_scales, b, kvh * GROUP + heads, heads < GROUP, dims,
                        HEADS, DIM, STRIDE,
                    )  # fmt: skip
                    tl.store(counters + pair, 0)


@triton.jit(do_not_specialize=["splits", "min_tiles"])
def merge_parts(
    partial,
    stats,
    lengths,
    out,
    out_scales,
    splits,
    min_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (head, piece of its dims, sequence) of what paged_decode gives without DEALT; where
    out is e4m3, a piece is a head.

    The parts of all splits are on their way together: one program that merges them all for a KV
    head would wait for memory again and again. Rows of one split or none are whole already.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    tiles = tl.cdiv(length - seen_from(length, WINDOW), TILE)
    active = active_splits(tiles, splits, min_tiles)
    split = tl.arange(0, MAX_SPLITS)
    dims = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    part = (b * KV_HEADS + head // group) * splits + split
    row = part * group + head % group
    ok = split < active
    pdl_wait(PDL)
    if active > 1:
        peaks = tl.load(stats + row * 2, mask=ok, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(stats + row * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
        inside = ok[:, None] & (dims < DIM)[None, :]
        cells = partial + row[:, None] * DIM_P + dims[None, :]
        values = tl.load(cells, mask=inside, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(peaks - tl.max(peaks, axis=0))
        merged = tl.sum(values * weight[:, None], axis=0) / tl.sum(totals * weight, axis=0)
        one = tl.arange(0, 1)
        write_heads(
            merged[None, :], out, out_scales, b, head + one, one == 0, dims, HEADS, DIM, STRIDE
        )
