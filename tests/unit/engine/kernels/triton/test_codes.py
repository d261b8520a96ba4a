"""Codes of rows, against torch's own rounding."""

import pytest
import torch

from engine.kernels.triton.coded import (
    CODE_GROUP,
    CodedRows,
    CodedWeight,
    Sums,
    pair_codes,
    pair_words,
)
from engine.kernels.triton.codes import (
    channel_codes,
    coded_product,
    gated_codes,
    group_numbers,
    row_codes,
)

E4M3 = torch.float8_e4m3fn


def room(rows, k, grouped, device):
    return (CodedRows.grouped if grouped else CodedRows.many)(rows, k, device)


def expected(wide, grouped):
    """Scales and codes of rows `[m, k]`."""
    groups = wide.unflatten(1, (-1, CODE_GROUP if grouped else wide.shape[1])).float()
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return scales[..., 0].T, (groups / scales).to(E4M3).flatten(1)


def check(got, wide, grouped):
    rows = wide.shape[0]
    scales, codes = expected(wide, grouped)
    torch.testing.assert_close(got.scales[:, :rows], scales, rtol=1e-3, atol=0)
    error = got.codes[:rows].float() - codes.float()
    assert (error.abs() <= codes.float().abs() * 2.0**-3 + 2.0**-9).all()
    assert (error != 0).float().mean() < 0.02  # a half unit that rounds the other way


def to_be_scaled(rows, k, device):
    """Sums whose memory goes on with NaN: kernels round rows up."""
    sizes = {"values": (rows, k), "row_scales": (1, rows), "channel_scales": (1, k)}
    parts = {}
    for name, size in sizes.items():
        longer = torch.full((2 * size[0] * size[1],), torch.nan, device=device)
        parts[name] = longer[: size[0] * size[1]].view(size)
    parts["values"].normal_().mul_(1e6)
    for scales in (parts["row_scales"], parts["channel_scales"]):
        scales.uniform_().mul_(1e-3)
    return Sums(**parts)


def scaled(sums):
    return sums.values * sums.row_scales.T * sums.channel_scales


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("what", ["rows", "norm", "sum and norm", "scaled sum and norm"])
def test_rows(device, grouped, what):
    rows, k = 5, 384
    h = torch.randn(rows, k, device=device).half() * 3.0
    gain = torch.rand(k, device=device).half() if what != "rows" else None
    delta, after = None, h.clone()
    if what.endswith("sum and norm"):
        delta = torch.randn(rows, k, device=device).half()
        after = h + delta
    if what.startswith("scaled"):
        delta = sums = to_be_scaled(rows, k, device)
        after = (h.float() + scaled(sums)).half()
    want = after.float()
    if gain is not None:
        want = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5) * gain.float()
    out = room(rows, k, grouped, device)
    row_codes(h, out=out, gain=gain, eps=1e-5, delta=delta)
    torch.testing.assert_close(h, after, rtol=2.0**-10 * (what[0] == "s"), atol=0)
    check(out, want, grouped)
    assert not out.codes[rows:].float().any()


@pytest.mark.parametrize("grouped", [False, True])
def test_swiglu(device, grouped):
    rows, k = 3, 640
    gate_up = torch.randn(rows, 2 * k, device=device).half()
    gate, up = gate_up.float().chunk(2, dim=1)
    out = room(rows, k, grouped, device)
    gated_codes(gate_up, out=out)
    check(out, torch.nn.functional.silu(gate) * up, grouped)


def test_a_row_of_zeros(device):
    out = CodedRows.many(2, 128, device)
    row_codes(torch.zeros(2, 128, device=device), out=out)
    assert not out.codes.float().any()
    assert (out.scales == 1.0).all()


def test_pairs_become_codes_for_a_product(device):
    n, k, group = 48, 256, 32
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(k // group, n, device=device) + 0.1).half()
    zeros = torch.randint(0, 16, (k // group, n), device=device)
    words, unit = pair_words(scales, zeros)
    wide = numbers.float().unflatten(1, (-1, group))
    wide = ((wide - zeros.T[..., None]) * scales.float().T[..., None]).flatten(1)
    channel = wide.abs().amax(1)[None] / 448.0
    got = channel_codes(
        CodedWeight(
            codes=pair_codes(numbers, group), scales=words, unit=unit, channel_scales=channel
        )
    )
    assert got.shape == (n, k)
    error = got.codes.float() * channel.T - wide
    assert (error.abs() <= wide.abs() * 2.0**-4 + channel.T * 2.0**-9).all()

    x = torch.randn(5, k, device=device)
    rows = CodedRows.many(5, k, device)
    row_codes(x, out=rows)
    bias = torch.randn(n, device=device).bfloat16()
    out = torch.empty(rows.shape[0], n, device=device, dtype=torch.bfloat16)
    coded_product(rows, got, out=out, bias=bias)
    exact = rows.codes[:5].float() * rows.scales[:, :5].T @ (got.codes.float() * channel.T).T
    torch.testing.assert_close(out[:5].float(), exact + bias.float(), rtol=2e-2, atol=0.1)


def test_products_of_blocks(device):
    """Of 128 x 128 weights and 1 x 128 inputs."""
    n, k, rows = 256, 512, 20
    codes = torch.randn(n, k, device=device).mul(50.0).to(E4M3)
    blocks = torch.rand(n // 128, k // 128, device=device) + 0.5
    scales = blocks.repeat_interleave(128, 0).t().contiguous()
    weight = CodedWeight(codes=codes, scales=scales, block_scales=blocks)
    assert weight.by_block
    assert not weight.by_channel
    wide = (codes.float().unflatten(1, (-1, 128)) * scales.t()[:, :, None]).flatten(1)
    assert torch.equal(group_numbers(weight, torch.float32), wide)
    x = torch.randn(rows, k, device=device)
    inputs = CodedRows.many(rows, k, device, groups=k // 128)
    row_codes(x, out=inputs)
    out = torch.empty(inputs.shape[0], n, device=device, dtype=torch.bfloat16)
    coded_product(inputs, weight, out=out, bias=None)
    groups = inputs.codes[:rows].float().unflatten(1, (-1, 128))
    want = (groups * inputs.scales[:, :rows].t()[:, :, None]).flatten(1) @ wide.t()
    assert (out[:rows].float() - want).norm() / want.norm() < 4e-3
    assert (want - x @ wide.t()).norm() / want.norm() < 0.05
