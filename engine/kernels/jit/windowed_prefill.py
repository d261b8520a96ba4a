# mypy: ignore-errors
"""Attention of a long prompt chunk to its own tokens, with a window or without, straight from the
projection.

Keys and values are rows of one matrix, which Hopper's copy engine brings in whole tiles; the query
heads of a KV head are rows of one tile. Scores of the next keys are computed while the softmax of
these runs.
"""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import capped


@triton.jit
def fold_keys(
    raw, query, keys, k_column, v_column, token, row, last, acc, peak, total, scale,
    MASKED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys row .. + TILE, whose products with the queries are `raw`, into the running softmax;
    also the products of the next keys. MASKED applies causality and the window; without one, no
    tile begins behind row `last`."""
    at, following = row, row + TILE
    if WINDOW == 0:
        at, following = tl.minimum(row, last), tl.minimum(row + TILE, last)
    following = tl.dot(query, keys.load([following, k_column]).T, input_precision=PRECISION)
    score, unit = raw, scale * 1.4426950408889634
    if SOFTCAP > 0.0:
        score, unit = capped(raw * scale, SOFTCAP), 1.4426950408889634
    if MASKED:
        key = (at + tl.arange(0, TILE))[None, :]
        visible = key <= token[:, None]
        if WINDOW > 0:
            visible &= key > token[:, None] - WINDOW
        else:
            visible &= key >= row
        score = tl.where(visible, score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1) * unit)
    weight = tl.exp2(score * unit - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weight, axis=1)
    value = keys.load([at, v_column])
    acc = tl.dot(weight.to(query.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    return following, acc, new_peak, total


@triton.jit
def windowed_prefill(
    qkv,
    stride,
    keys,
    tiles,
    out,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    INNER: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (KV head, tile): BLOCK_M / (HEADS / KV_HEADS) tokens. qkv `[rows, stride]` is rotated;
    keys is a descriptor of its tiles `[TILE, DIM]`.

    A tile is FIELDS integers: row of its first token, tokens, the rows begin .. end of the keys to
    attend to, all of the same chunk: a multiple of TILE; without a window (0) at least TILE. INNER:
    keys that all queries of the tile see take no masks.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    kvh = tl.program_id(0)
    at = tiles + tl.program_id(1) * FIELDS
    first = tl.load(at)
    count = tl.load(at + 1)
    begin = tl.load(at + 2)
    end = tl.load(at + 4)
    local = tl.arange(0, BLOCK_M)
    token = first + local // group
    inside = (local // group < count)[:, None]
    dims = tl.arange(0, DIM)
    column = (kvh * group + local % group)[:, None] * DIM + dims[None, :]
    rows = token.to(tl.int64)[:, None]
    query = tl.load(qkv + rows * stride + column, mask=inside, other=0.0)
    k_column = (HEADS + kvh) * DIM
    v_column = k_column + KV_HEADS * DIM
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], -1e30, tl.float32)  # a query may see nothing of the first keys
    total = tl.zeros([BLOCK_M], tl.float32)
    raw = tl.dot(query, keys.load([begin, k_column]).T, input_precision=PRECISION)
    left, right, last = begin, begin, end - TILE
    if INNER:  # all queries see all keys of these tiles
        right += tl.maximum(first + 1 - begin, 0) // TILE * TILE
        if WINDOW > 0:
            left += tl.cdiv(tl.maximum(first + count - WINDOW - begin, 0), TILE) * TILE
            left = tl.minimum(left, end)
            right = tl.maximum(right, left)
            for row in tl.range(begin, left, TILE, num_stages=1):
                raw, acc, peak, total = fold_keys(
                    raw, query, keys, k_column, v_column, token, row, last, acc, peak, total, scale,
                    True, TILE, WINDOW, SOFTCAP, PRECISION,
                )  # fmt: skip
        for row in tl.range(left, right, TILE, num_stages=STAGES):
            raw, acc, peak, total = fold_keys(
                raw, query, keys, k_column, v_column, token, row, last, acc, peak, total, scale,
                False, TILE, WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
    for row in tl.range(right, end, TILE, num_stages=1 if INNER else STAGES):
        raw, acc, peak, total = fold_keys(
            raw, query, keys, k_column, v_column, token, row, last, acc, peak, total, scale,
            True, TILE, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)  # rows behind the last token
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows * out_stride + column, result, mask=inside)
