import numpy as np
import pytest
import torch

from engine.kernels.triton import attention as ops
from engine.kernels.triton import prefill_attention as pre
from engine.kernels.triton import splits as cuts
from engine.kernels.triton.coded import CodedRows
from engine.kernels.triton.codes import row_codes
from engine.kernels.triton.elementwise import HeadNorms

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
PAGE = 16


def dense_attention(q, k, v, start, rule):
    """q [t, heads, dim] at positions start.. over k, v [length, kv_heads, dim], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    score = torch.einsum("thd,lhd->htl", q.double(), k) * rule.scale
    if rule.softcap:
        score = rule.softcap * torch.tanh(score / rule.softcap)
    at = torch.arange(k.shape[0], device=q.device)
    positions = start + torch.arange(q.shape[0], device=q.device)[:, None]
    allowed = at[None, :] <= positions
    if rule.window:
        allowed &= at[None, :] > positions - rule.window
    score = score.masked_fill(~allowed, float("-inf"))
    return torch.einsum("htl,lhd->thd", score.softmax(-1), v)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rule(dim, window=0, softcap=0.0, norms=None):
    return ops.ScoreRule(scale=dim**-0.5, softcap=softcap, window=window, norms=norms)


def normed(x, gain, eps=1e-6):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.double()


class Paged:
    """Contexts spread over shuffled blocks of a pool whose unused cells are NaN."""

    def __init__(self, lengths, kv_heads, dim, device, dtype, seen=None):
        """Cells before token seen[i] of a context are NaN, too."""
        counts = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(counts) + 3)
        shape = (len(order), 2, kv_heads, PAGE, dim)
        self.pool = torch.full(shape, float("nan"), device=device, dtype=dtype)
        self.tables, self.keys, self.values = [], [], []
        first = 0
        for length, count in zip(lengths, counts, strict=True):
            table = order[first : first + count].tolist()
            first += count
            kv = torch.randn(2, length, kv_heads, dim, device=device).to(dtype)
            for at in range(seen[len(self.tables)] if seen else 0, length):
                self.pool[table[at // PAGE], :, :, at % PAGE] = kv[:, at]
            self.tables.append(table)
            self.keys.append(kv[0])
            self.values.append(kv[1])
        flat = [block for table in self.tables for block in table]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.blocks = torch.tensor(flat or [0], device=device, dtype=torch.int32)
        self.starts = torch.tensor(starts, device=device, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 64), (8, 2, 96), (8, 1, 128), (9, 3, 64), (4, 2, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [0, 1, 3, 9])
def test_decode_attention(device, heads, kv_heads, dim, dtype, splits):
    decode(device, heads, kv_heads, dim, dtype, splits, rule(dim))


@pytest.mark.parametrize(
    ("heads", "dim", "splits", "window", "softcap"),
    [
        (4, 96, 1, 20, 0.0),
        (4, 96, 3, 37, 0.7),
        (4, 96, 0, 37, 0.7),
        (4, 256, 3, 100, 0.0),
        (2, 256, 9, 100, 0.7),
        (4, 96, 3, 0, 0.7),
    ],
)
def test_decode_attention_reads_its_window_only(device, heads, dim, splits, window, softcap):
    """With norms of heads and softcaps, as Gemma has them."""
    gains = [torch.rand(dim, device=device) + 0.5 for _ in range(2)]
    norms = HeadNorms(q=gains[0], k=gains[1], eps=1e-6)
    decode(device, heads, 2, dim, torch.float32, splits, rule(dim, window, softcap, norms))


@pytest.mark.parametrize("splits", [0, 1, 3, 9])
def test_decode_attention_leaves_codes(device, splits):
    """Those of the numbers that it would leave, padding included."""
    heads, dim = 4, 128
    lengths = torch.tensor([1, 70, 131, 0], device=device, dtype=torch.int32)
    paged = Paged(lengths[:3].tolist(), 2, dim, device, torch.float32)
    starts = torch.cat([paged.starts, paged.starts[-1:]])
    qkv = torch.randn(4, (heads + 4) * dim, device=device)
    angle = torch.rand(160, dim // 2, device=device) * 6.3
    shape = ops.DecodeShape(splits=splits, tile=32, min_tiles=1, stages=2)
    scratch = ops.DecodeScratch(4, max(10, 4 * splits), heads, dim, device)
    cut = cut_by_length(lengths, 2, splits)
    numbers = torch.full((4, heads * dim), float("nan"), device=device)
    codes, expected = (CodedRows.grouped(4, heads * dim, device) for _ in range(2))
    for out in (numbers, codes):
        ops.decode_attention(
            qkv, angle.cos(), angle.sin(), paged.pool, starts, paged.blocks, lengths,
            scratch, shape, rule(dim), num_heads=heads, out=out, **cut,
        )  # fmt: skip
    assert ops.leaves_codes(dim)
    row_codes(numbers, out=expected)
    assert torch.equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    # The kernel that merges many splits sums a head's dims in pieces of another size for numbers.
    exact = device.type == "cpu" or splits < 3
    tolerance = {"rtol": 0.0 if exact else 1e-6, "atol": 0.0}
    torch.testing.assert_close(codes.scales[:, :4], expected.scales[:, :4], **tolerance)


def cut_by_length(lengths, kv_heads, splits, *, tile=32, each=1, room=10, window=0):
    """What cuts contexts into splits of `each` tiles, where `splits` is 0; one of padding, too."""
    if splits:
        return {}
    seen = lengths.cpu().numpy()
    tiles = -(-(np.minimum(seen, window) if window else seen) // tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "WAVE", max(1, int(tiles.sum()) * kv_heads // each))
        table = cuts.plan_splits(tiles, kv_heads, room)
    table = np.concatenate((table, np.full(1 + room - len(table), 0x01010001, np.int32)))
    return {"table": torch.from_numpy(table).to(lengths.device), "room": room}


def decode(device, heads, kv_heads, dim, dtype, splits, scores):
    lengths = [1, 16, 17, 70, 131] * (1 if splits < 9 else 2)
    window = scores.window
    seen = [max(0, n - window) if window else 0 for n in lengths]
    paged = Paged(lengths, kv_heads, dim, device, dtype, seen)
    batch = len(lengths) + 1
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angle = torch.rand(160, dim // 2, device=device) * 6.3
    shape = ops.DecodeShape(splits=splits, tile=32, min_tiles=1, stages=2)
    scratch = ops.DecodeScratch(batch, max(13, batch * splits), heads, dim, device)
    length_row = torch.tensor([*lengths, 0], device=device, dtype=torch.int32)
    starts = torch.cat([paged.starts, paged.starts[-1:]])
    out = torch.full((batch, heads * dim), float("nan"), device=device).to(dtype)
    cut = cut_by_length(length_row, kv_heads, splits, room=13, window=window)
    for _ in range(2):  # twice: the split counters must be left at zero
        ops.decode_attention(
            qkv, angle.cos(), angle.sin(), paged.pool, starts, paged.blocks, length_row,
            scratch, shape, scores, num_heads=heads, out=out, **cut,
        )  # fmt: skip
    for row, length in enumerate(lengths):
        q, k, v = qkv[row].view(-1, dim).split([heads, kv_heads, kv_heads])
        if scores.norms is not None:
            q, k = normed(q, scores.norms.q), normed(k, scores.norms.k)
        cos, sin = angle[length - 1].double().cos(), angle[length - 1].double().sin()
        q, k = rotate(q.double(), cos, sin), rotate(k.double(), cos, sin)
        keys, values = paged.keys[row].clone(), paged.values[row].clone()
        keys[-1], values[-1] = k.to(dtype), v
        want = dense_attention(q.to(dtype)[None], keys, values, length - 1, scores)[0]
        got = out[row].view(heads, dim).double()
        assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
        cell = paged.pool[paged.tables[row][(length - 1) // PAGE], :, :, (length - 1) % PAGE]
        torch.testing.assert_close(cell[0].double(), k, rtol=1e-2, atol=1e-2)
        assert torch.equal(cell[1], v)
    assert int(scratch.counters.abs().sum()) == 0
    assert int(out[-1].count_nonzero()) == 0


def prefill(qkv, paged, chunks, heads, dim, scores):
    """The output of chunk attention, and the plan's tiles."""
    firsts = [sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
    spans = [
        pre.ChunkSpan(first_row=first, count=count, start=start, table=int(table))
        for first, (start, count), table in zip(firsts, chunks, paged.starts, strict=False)
    ]
    shape = pre.chunk_shape(qkv.dtype, dim)
    plan = pre.plan_tiles(spans, heads, shape.queries, window=scores.window)
    padding = np.zeros((2, pre.TILE_FIELDS), np.int32)
    tiles = torch.from_numpy(np.concatenate([plan.tiles, padding])).to(qkv.device)
    scratch = pre.ChunkScratch(heads, dim, qkv.dtype, qkv.device)
    out = torch.full((qkv.shape[0], heads * dim), float("nan"), device=qkv.device).to(qkv.dtype)
    for _ in range(2):  # twice: the parts' counters must be left at zero
        pre.prefill_attention(
            qkv, paged.pool, tiles, paged.blocks, scratch, scores, shape,
            split=plan.split, num_heads=heads, out=out,
        )  # fmt: skip
    assert int(scratch.counters.abs().sum()) == 0
    return out, plan


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 1, 96), (8, 1, 128), (3, 1, 64), (2, 1, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("chunks", [[(0, 1), (0, 70)], [(5, 16), (0, 17), (63, 33)], [(130, 5)]])
@pytest.mark.parametrize("part", [64, 256])
def test_prefill_attention(device, monkeypatch, heads, kv_heads, dim, dtype, chunks, part):
    monkeypatch.setattr(pre, "_MIN_PART", part)
    plan = prefill_equals_dense(device, heads, kv_heads, dim, dtype, chunks, rule(dim))
    assert plan.split == (part == 64 and max(start + count for start, count in chunks) > 100)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 96), (1, 1, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(3, 0.0), (37, 0.7), (100, 0.0), (0, 0.7)])
@pytest.mark.parametrize("chunks", [[(0, 70), (63, 33)], [(130, 80)]])
@pytest.mark.parametrize("part", [16, 256])
def test_prefill_attention_of_windows(
    device, monkeypatch, heads, kv_heads, dim, window, softcap, chunks, part
):
    """What no query of a chunk sees may be NaN; parts of which a query sees nothing add nothing."""
    monkeypatch.setattr(pre, "_MIN_PART", part)
    monkeypatch.setattr(pre, "_PART_STEP", 32)
    scores = rule(dim, window, softcap)
    prefill_equals_dense(device, heads, kv_heads, dim, torch.float32, chunks, scores)


def prefill_equals_dense(device, heads, kv_heads, dim, dtype, chunks, scores):
    lengths, window = [start + count for start, count in chunks], scores.window
    seen = [max(0, start - window + 1) if window else 0 for start, _ in chunks]
    paged = Paged(lengths, kv_heads, dim, device, dtype, seen)
    total = sum(count for _, count in chunks)
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    out, plan = prefill(qkv, paged, chunks, heads, dim, scores)
    first = 0
    for i, (start, count) in enumerate(chunks):
        rows = slice(first, first + count)
        first += count
        q = qkv[rows, : heads * dim].view(count, heads, dim)
        want = dense_attention(q, paged.keys[i], paged.values[i], start, scores)
        got = out[rows].view(count, heads, dim).double()
        assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    return plan


def test_tiles_cover_every_query_and_the_context_that_it_sees():
    spans = [
        pre.ChunkSpan(first_row=3, count=64, start=2048, table=7),
        pre.ChunkSpan(first_row=67, count=300, start=10, table=200),
        pre.ChunkSpan(first_row=367, count=100, start=8300, table=300, begin=8192, end=8300),
    ]
    plan = pre.plan_tiles(spans, heads=8, rows=128)
    tiles = plan.tiles
    assert plan.split
    lengths = tiles[:, 5] - tiles[:, 4]
    assert (np.diff(lengths) <= 0).all()
    assert lengths.min() > 0
    for span in spans:
        for first in range(0, span.count, 128):
            mine = tiles[tiles[:, 0] == span.first_row + first]
            mine = mine[np.argsort(mine[:, 7])]
            assert mine[:, 7].tolist() == list(range(mine[0, 8]))
            assert mine[0, 4] == span.begin
            assert mine[:-1, 5].tolist() == mine[1:, 4].tolist()
            assert (mine[:, 4] % 64 == 0).all()
            count = min(128, span.count - first)
            assert mine[-1, 5] == (span.end or span.start + first + count)
            assert mine[-1, 4] <= mine[-1, 2] == span.start + first
    slots = [slot + part for *_, slot, part, parts in tiles.tolist() if parts > 1]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= pre.max_parts(8)


def test_attention_to_history_and_to_the_chunk_merge(device):
    """Segments of the history, contiguous and paged, and the chunk's own tokens."""
    heads, kv_heads, dim, start, count = 6, 2, 64, 160, 40
    paged = Paged([start + count], kv_heads, dim, device, torch.float32)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, device=device)
    q = qkv[:, : heads * dim].view(count, heads, dim)
    acc, acc_lse = qkv.new_zeros(count, heads, dim), qkv.new_zeros(count, heads)
    group = heads // kv_heads
    for first in (0, 64):
        kv = qkv.new_empty(2, kv_heads, 64, dim)
        pre.gather_history(paged.pool, paged.blocks[first // PAGE : (first + 64) // PAGE], out=kv)
        assert torch.equal(kv[0].transpose(0, 1), paged.keys[0][first : first + 64])
        k, v = kv.repeat_interleave(group, 1)
        score = torch.einsum("thd,hld->htl", q, k) * dim**-0.5
        part = torch.einsum("htl,hld->thd", score.softmax(-1), v).contiguous()
        pre.merge_attention(acc, acc_lse, part, score.logsumexp(-1).t(), first=not first, out=None)
    out = qkv.new_empty(count, heads * dim)
    rest = torch.empty_like(out)
    lse = torch.empty_like(acc_lse)
    spans = [pre.ChunkSpan(first_row=0, count=count, start=start, table=0, begin=128)]
    shape = pre.chunk_shape(qkv.dtype, dim)
    plan = pre.plan_tiles(spans, heads, shape.queries)
    scratch = pre.ChunkScratch(heads, dim, qkv.dtype, device)
    pre.prefill_attention(
        qkv, paged.pool, torch.from_numpy(plan.tiles).to(device), paged.blocks, scratch,
        rule(dim), shape, split=False, num_heads=heads, out=rest, lse=lse,
    )  # fmt: skip
    pre.merge_attention(acc, acc_lse, rest.view(count, heads, dim), lse, first=False, out=out)
    want = dense_attention(q, paged.keys[0], paged.values[0], start, rule(dim))
    got = out.view(count, heads, dim).double()
    assert (got - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 96), (8, 2, 128), (3, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("each", "part", "window", "softcap"),
    [(9, 64, 0, 0.0), (9, 256, 0, 0.0), (1, 64, 0, 0.0), (1, 256, 0, 0.0), (1, 64, 100, 0.7)],
)
def test_mixed_attention(
    device, monkeypatch, heads, kv_heads, dim, dtype, each, part, window, softcap
):
    """Decode rows and chunks give what they give without the other, and no other row changes."""
    monkeypatch.setattr(pre, "_MIN_PART", part)
    decodes, chunks = [1, 17, 131], [(63, 33), (0, 70), (130, 5)]
    lengths = [*decodes, *(start + count for start, count in chunks)]
    paged = Paged(lengths, kv_heads, dim, device, dtype)
    rows = len(decodes) + sum(count for _, count in chunks)
    qkv = torch.randn(rows + 2, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angle = torch.rand(160, dim // 2, device=device) * 6.3
    scratch = ops.DecodeScratch(3, 9, heads, dim, device)
    first, spans = len(decodes), []
    for (start, count), table in zip(chunks, paged.starts[len(decodes) :], strict=False):
        spans.append(pre.ChunkSpan(first_row=first, count=count, start=start, table=int(table)))
        first += count
    plan = pre.plan_tiles(spans, heads, pre.MIXED_TILE, window=window)
    assert plan.split == (part == 64 and not window)
    length_row = torch.tensor([*decodes, 0, 0], device=device, dtype=torch.int32)
    cut = cut_by_length(length_row[:3], kv_heads, 0, tile=64, each=each, room=7, window=window)
    padding = np.zeros((2, pre.TILE_FIELDS), np.int32) + 1  # no tiles, whatever they hold
    tiles = torch.from_numpy(np.concatenate([plan.tiles, padding])).to(device)
    counts = torch.tensor([len(plan.tiles)], device=device, dtype=torch.int32)
    chunk_scratch = pre.ChunkScratch(heads, dim, dtype, device)
    out = torch.full((rows + 2, heads * dim), float("nan"), device=device).to(dtype)
    want, scores = out.clone(), rule(dim, window, softcap)
    sizes = {"num_heads": heads, "out": out}
    for _ in range(2):  # twice: all counters must be left at zero
        pre.prefill_attention(
            qkv, paged.pool, tiles, paged.blocks, chunk_scratch, scores,
            pre.mixed_shape(dtype, dim), split=True, counts=counts, **sizes,
        )  # fmt: skip
        ops.decode_attention(
            qkv, angle.cos(), angle.sin(), paged.pool, paged.starts, paged.blocks, length_row,
            scratch, ops.DecodeShape(splits=0), scores, **cut, **sizes,
        )  # fmt: skip
    assert int(scratch.counters.abs().sum() + chunk_scratch.counters.abs().sum()) == 0
    ops.decode_attention(
        qkv[:3], angle.cos(), angle.sin(), paged.pool, paged.starts, paged.blocks, length_row,
        scratch, ops.DecodeShape(splits=3), scores, num_heads=heads, out=want[:3],
    )  # fmt: skip
    shape = pre.chunk_shape(dtype, dim)
    tiles = pre.plan_tiles(spans, heads, shape.queries, window=window).tiles
    pre.prefill_attention(
        qkv, paged.pool, torch.from_numpy(tiles).to(device), paged.blocks, chunk_scratch, scores,
        shape, split=True, num_heads=heads, out=want,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert out[rows:].isnan().all()
    assert not out[:rows].isnan().any()
