# mypy: ignore-errors
"""Attention with a window of a long prompt chunk to its own tokens, straight from the projection.

Keys and values are rows of one matrix, which Hopper's copy engine brings in whole tiles; the query
heads of a KV head are rows of one tile. Scores of the next keys are computed while the softmax of
these runs.
"""

import triton
import triton.language as tl

from engine.kernels.jit.elementwise import capped


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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (KV head, tile): BLOCK_M / (HEADS / KV_HEADS) tokens. qkv `[rows, stride]` is rotated;
    keys is a descriptor of its tiles `[TILE, DIM]`.

    A tile is FIELDS integers: row of its first token, tokens, the rows begin .. end of the keys to
    attend to, a multiple of TILE and all of the same chunk.
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
    for row in tl.range(begin, end, TILE, num_stages=STAGES):
        key = row + tl.arange(0, TILE)
        following = tl.dot(query, keys.load([row + TILE, k_column]).T, input_precision=PRECISION)
        if SOFTCAP > 0.0:
            score = capped(raw * scale, SOFTCAP) * 1.4426950408889634
        else:
            score = raw * (scale * 1.4426950408889634)
        visible = (key[None, :] <= token[:, None]) & (key[None, :] > token[:, None] - WINDOW)
        score = tl.where(visible, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        value = keys.load([row, v_column])
        acc = tl.dot(
            weight.to(query.dtype), value, acc * shrink[:, None], input_precision=PRECISION
        )
        peak = new_peak
        raw = following
    total = tl.where(total > 0.0, total, 1.0)  # rows behind the last token
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows * out_stride + column, result, mask=inside)
