"""Attention with a window to a chunk's own tokens, and the plan of its tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.triton.attention import ScoreRule
from engine.kernels.triton.prefill_attention import ChunkSpan
from engine.kernels.triton.windowed_prefill import max_tiles, plan_window, windowed_prefill

ROWS, KEYS = 32, 16


@given(
    st.integers(0, 9),
    st.integers(1, 400),
    st.integers(0, 80),
    st.integers(0, 90),
    st.sampled_from((1, 2, 4)),
)
def test_each_token_is_planned_once_and_sees_keys_of_its_chunk_only(
    row, count, start, window, group
):
    start *= window > 0  # without a window a chunk with history is another kernel's
    span = ChunkSpan(first_row=row, count=count, start=start, table=3)
    plan = plan_window(span, window, group, rows=ROWS, keys=KEYS)
    tokens: list[int] = []
    for first, n, begin, table, end, *_ in plan.tiles:
        assert (n, table) <= (ROWS // group, 3)
        assert (end - begin) % KEYS == 0 if window else end - begin >= KEYS
        assert row <= begin < end <= row + count
        assert begin <= (max(row, first - window + 1) if window else row)
        assert end >= first + n
        assert start == 0 or first - window + 1 >= row  # none sees the history
        tokens += range(first, first + n)
    for part in plan.paged:
        assert (part.start - start, part.table) == (part.first_row - row, 3)
        tokens += range(part.first_row, part.first_row + part.count)
    assert sorted(tokens) == list(range(row, row + count))
    if count >= (KEYS + window + ROWS if window else KEYS) and not start:
        assert plan.paged == []
    assert len(plan_window(span, window, group).tiles) <= max_tiles(count, 1, group)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "softcap", "norm"),
    [
        (4, 2, 64, 0.0, 1.0),
        (4, 1, 40, 3.0, 1.0),
        (2, 2, 5, 0.0, 3.0),
        (6, 2, 0, 0.0, 1.0),
        (2, 2, 0, 3.0, 3.0),
    ],
)
@pytest.mark.parametrize("inner_dim", [0, 128])
def test_attention_is_that_of_the_window(
    device, monkeypatch, heads, kv_heads, window, softcap, norm, inner_dim
):
    """Rows of others, beside the chunk, may be anything."""
    monkeypatch.setattr("engine.kernels.triton.windowed_prefill._INNER_DIM", inner_dim)
    dim, first, count, group = 16, 7, 99, heads // kv_heads
    generator = torch.Generator().manual_seed(3)
    qkv = torch.full((first + count + 9, (heads + 2 * kv_heads) * dim), torch.nan)
    qkv[first : first + count] = torch.randn(count, qkv.shape[1], generator=generator) * norm
    qkv = qkv.to(device)
    span = ChunkSpan(first_row=first, count=count, start=0, table=0)
    plan = plan_window(span, window, group, rows=ROWS, keys=KEYS)
    out = torch.full((qkv.shape[0], heads * dim), -7.0, device=device)
    tiles = torch.tensor(plan.tiles, dtype=torch.int32, device=device)
    rule = ScoreRule(scale=0.3, softcap=softcap, window=window)
    windowed_prefill(
        qkv, tiles, rule, num_heads=heads, kv_heads=kv_heads, out=out, rows=ROWS, keys=KEYS
    )
    own = qkv[first : first + count].view(count, -1, dim).transpose(0, 1).double()
    q, k, v = own.split((heads, kv_heads, kv_heads))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(count, device=device)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or count))
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    want = want.transpose(0, 1).reshape(count, -1).float()
    planned = sorted(row for row, n, *_ in plan.tiles for row in range(row, row + n))
    assert len(planned) > count // 2
    torch.testing.assert_close(
        out[planned], want[[row - first for row in planned]], rtol=1e-4, atol=1e-4
    )
    others = sorted(set(range(out.shape[0])) - set(planned))
    assert (out[others] == -7.0).all()
