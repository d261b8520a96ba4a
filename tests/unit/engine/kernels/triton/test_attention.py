import pytest
import torch

from engine.kernels.triton import attention as ops

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
PAGE = 16


def dense_attention(q, k, v, start, scale):
    """q [t, heads, dim] at positions start.. over k, v [length, kv_heads, dim], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    score = torch.einsum("thd,lhd->htl", q.double(), k) * scale
    at = torch.arange(k.shape[0], device=q.device)
    allowed = at[None, :] <= start + torch.arange(q.shape[0], device=q.device)[:, None]
    score = score.masked_fill(~allowed, float("-inf"))
    return torch.einsum("htl,lhd->thd", score.softmax(-1), v)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Paged:
    """Contexts spread over shuffled blocks of a pool whose unused cells are NaN."""

    def __init__(self, lengths, kv_heads, dim, device, dtype):
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
            for at in range(length):
                self.pool[table[at // PAGE], :, :, at % PAGE] = kv[:, at]
            self.tables.append(table)
            self.keys.append(kv[0])
            self.values.append(kv[1])
        flat = [block for table in self.tables for block in table]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.blocks = torch.tensor(flat or [0], device=device, dtype=torch.int32)
        self.indptr = torch.tensor(starts, device=device, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 64), (8, 2, 96), (8, 1, 128), (9, 3, 64), (4, 2, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 3, 8, 9])
def test_decode_attention(device, heads, kv_heads, dim, dtype, splits):
    lengths = [1, 16, 17, 70, 131] * (1 if splits < 9 else 2)
    paged = Paged(lengths, kv_heads, dim, device, dtype)
    batch = len(lengths) + 1
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angle = torch.rand(160, dim // 2, device=device) * 6.3
    shape = ops.DecodeShape(splits=splits, tile=32, min_tiles=1, stages=2)
    scratch = ops.DecodeScratch(batch, batch * splits, heads, dim, device)
    length_row = torch.tensor([*lengths, 0], device=device, dtype=torch.int32)
    indptr = torch.cat([paged.indptr, paged.indptr[-1:]])
    out = torch.full((batch, heads * dim), float("nan"), device=device).to(dtype)
    scale = dim**-0.5
    for _ in range(2):  # twice: the split counters must be left at zero
        ops.decode_attention(
            qkv, angle.cos(), angle.sin(), paged.pool, indptr, paged.blocks, length_row,
            scratch, shape, num_heads=heads, scale=scale, out=out,
        )  # fmt: skip
    for row, length in enumerate(lengths):
        q, k, v = qkv[row].view(-1, dim).split([heads, kv_heads, kv_heads])
        cos, sin = angle[length - 1].double().cos(), angle[length - 1].double().sin()
        q, k = rotate(q.double(), cos, sin), rotate(k.double(), cos, sin)
        keys, values = paged.keys[row].clone(), paged.values[row].clone()
        keys[-1], values[-1] = k.to(dtype), v
        want = dense_attention(q.to(dtype)[None], keys, values, length - 1, scale)[0]
        got = out[row].view(heads, dim).double()
        assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
        cell = paged.pool[paged.tables[row][(length - 1) // PAGE], :, :, (length - 1) % PAGE]
        torch.testing.assert_close(cell[0].double(), k, rtol=1e-2, atol=1e-2)
        assert torch.equal(cell[1], v)
    assert int(scratch.counters.abs().sum()) == 0
    assert int(out[-1].count_nonzero()) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 1, 96), (8, 1, 128), (3, 1, 64), (2, 1, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("chunks", [[(0, 1), (0, 70)], [(5, 16), (0, 17), (63, 33)], [(130, 5)]])
def test_prefill_attention(device, heads, kv_heads, dim, dtype, chunks):
    paged = Paged([start + count for start, count in chunks], kv_heads, dim, device, dtype)
    total = sum(count for _, count in chunks)
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    firsts = [sum(count for _, count in chunks[:i]) for i in range(len(chunks))]

    def vector(values):
        return torch.tensor(values, device=device, dtype=torch.int32)

    packed = ops.PackedChunks(
        first_rows=vector(firsts),
        starts=vector([start for start, _ in chunks]),
        counts=vector([count for _, count in chunks]),
        indptr=paged.indptr,
        blocks=paged.blocks,
        max_count=max(count for _, count in chunks),
    )
    out = torch.full((total, heads * dim), float("nan"), device=device).to(dtype)
    ops.prefill_attention(qkv, paged.pool, packed, num_heads=heads, scale=dim**-0.5, out=out)
    for i, (start, count) in enumerate(chunks):
        rows = slice(firsts[i], firsts[i] + count)
        q = qkv[rows, : heads * dim].view(count, heads, dim)
        want = dense_attention(q, paged.keys[i], paged.values[i], start, dim**-0.5)
        got = out[rows].view(count, heads, dim).double()
        assert (got - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
