import pytest
import torch

from engine.kernels.activation import Activation
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
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_product(device, dtype, rows, width, activation):
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)
    out = torch.full((rows, width), float("nan"), device=device).to(dtype)
    ops.gated_product(gate_up, out=out, activation=activation)
    gate, up = gate_up.double().split(width, dim=-1)
    if activation is Activation.SILU:
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    assert relative_error(out, gate * up) < TOLERANCE[dtype]


def normed(x, gain, eps=1e-6):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.double()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("gains", [None, torch.float32])
@pytest.mark.parametrize("following", [True, False])
def test_a_norm_behind_a_product_is_added_and_the_next_taken(device, dtype, gains, following):
    y, h = (torch.randn(3, 96, device=device).to(dtype) for _ in range(2))
    post, gain = (torch.rand(96, device=device).to(gains or dtype) for _ in range(2))
    want = h.double() + normed(y, post)
    out = torch.full_like(h, float("nan"))
    ops.add_normed(y, post, h, gain if following else None, 1e-6, out=out)
    assert relative_error(h, want) < TOLERANCE[dtype]
    if following:
        assert relative_error(out, normed(h, gain)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_over_all_heads(device, dtype):
    """In place; of one rank, and of two that add up their squares."""
    qkv = torch.randn(5, 12 * 24, device=device).to(dtype)
    gains = [torch.rand(n * 24, device=device).to(dtype) for n in (6, 4)]
    want = torch.cat([normed(qkv[:, :144], gains[0]), normed(qkv[:, 144:240], gains[1])], dim=1)
    for ranks in (1, 2):
        parts = [
            torch.cat([x.chunk(ranks, 1)[rank] for x in qkv.split((144, 96, 48), dim=1)], dim=1)
            for rank in range(ranks)
        ]
        mine = [[g.chunk(ranks)[rank] for g in gains] for rank in range(ranks)]
        sums = [torch.zeros(5, 2, device=device) for _ in parts]
        if ranks > 1:
            for part, own, squares in zip(parts, mine, sums, strict=True):
                ops.norm_parts(part, *own, squares, 1e-6, (144, 96), write=True)
            sums = [sum(sums)] * 2
        for part, own, squares in zip(parts, mine, sums, strict=True):
            ops.norm_parts(part, *own, squares, 1e-6, (144, 96), read=ranks > 1)
        q = torch.cat([part[:, : 144 // ranks] for part in parts], dim=1)
        k = torch.cat([part[:, 144 // ranks : 240 // ranks] for part in parts], dim=1)
        assert relative_error(torch.cat([q, k], dim=1), want) < TOLERANCE[dtype]
        values = torch.cat([part[:, 240 // ranks :] for part in parts], dim=1)
        assert torch.equal(values, qkv[:, 240:])


def test_softcap_of_logits(device):
    logits = torch.randn(3, 5000, device=device) * 40
    want = 30 * torch.tanh(logits.double() / 30)
    ops.cap_logits(logits, 30.0)
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)


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
    ops.embed(tokens, feed, previous, table, 3, out=out, scale=8.0)
    want = torch.stack([table[0], table[2], torch.zeros_like(table[0]), table[9]])
    assert torch.equal(out, 8.0 * want)
