import pytest
import torch

from engine.kernels.triton import elementwise as ops

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TOLERANCE = {torch.float32: 2e-6, HALF: 8e-3}


def relative_error(out, reference):
    reference = reference.double()
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (3, 4096), (5, 96)])
def test_rms_norm(device, dtype, rows, hidden):
    x = torch.randn(rows, hidden, device=device).to(dtype)
    gain = torch.rand(hidden, device=device).to(dtype)
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    out = torch.full_like(x, float("nan"))
    ops.rms_norm(x, gain, 1e-5, out=out)
    assert relative_error(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 1024), (2, 100)])
def test_silu_mul(device, dtype, rows, width):
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)
    out = torch.full((rows, width), float("nan"), device=device).to(dtype)
    ops.silu_mul(gate_up, out=out)
    gate, up = gate_up.double().split(width, dim=-1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 2, 24), (1, 1, 128)])
def test_head_norm(device, dtype, heads, kv_heads, dim):
    """Queries and keys in place, each with its gain; values stay."""
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    gains = [torch.rand(dim, device=device).to(dtype) for _ in range(2)]
    wide = qkv.double().unflatten(1, (-1, dim))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    want = torch.cat(
        (
            normed[:, :heads] * gains[0].double(),
            normed[:, heads : heads + kv_heads] * gains[1].double(),
        ),
        1,
    ).flatten(1)
    values = qkv[:, (heads + kv_heads) * dim :].clone()
    ops.head_norm(qkv, *gains, 1e-6, num_heads=heads)
    assert relative_error(qkv[:, : want.shape[1]], want) < TOLERANCE[dtype]
    assert torch.equal(qkv[:, want.shape[1] :], values)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_rope_write(device, dim, heads, kv_heads):
    page, tokens = 16, 5
    pool = torch.full((7, 2, kv_heads, page, dim), float("nan"), device=device)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device)
    angle = torch.rand(64, dim // 2, device=device) * 6.3
    positions = torch.tensor([0, 1, 17, 40, 3], device=device, dtype=torch.int32)
    slots = torch.tensor([15, 16, 6 * 16 + 3, 0, -1], device=device, dtype=torch.int32)
    before = qkv.clone()
    ops.rope_write(qkv, angle.cos(), angle.sin(), positions, slots, pool, heads)
    q, k, v = before.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    cos = angle[positions.long()].double().cos()[:, None]
    sin = angle[positions.long()].double().sin()[:, None]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    got = qkv.view(tokens, -1, dim)
    assert torch.equal(qkv[-1], before[-1])
    torch.testing.assert_close(got[:-1, :heads].double(), q[:-1], rtol=1e-5, atol=1e-5)
    written = 0
    for row, slot in enumerate(slots.tolist()[:-1]):
        cell = pool[slot // page, :, :, slot % page].double()
        torch.testing.assert_close(cell[0], k[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cell[1], v[row])
        written += cell.numel()
    assert int((~pool.isnan()).sum()) == written


def test_embed_takes_device_tokens_and_skips_foreign_ids(device):
    table = torch.randn(10, 48, device=device)
    tokens = torch.tensor([3, 7, 99, 12], device=device, dtype=torch.int32)
    feed = torch.tensor([-1, 1, -1, -1], device=device, dtype=torch.int32)
    previous = torch.tensor([50, 5], device=device, dtype=torch.int32)
    out = torch.full((4, 48), float("nan"), device=device)
    ops.embed(tokens, feed, previous, table, 3, out=out)
    want = torch.stack([table[0], table[2], torch.zeros_like(table[0]), table[9]])
    assert torch.equal(out, want)
