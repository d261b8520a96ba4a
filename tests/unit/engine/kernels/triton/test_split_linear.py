import pytest
import torch

from engine.kernels.triton.split_linear import (
    MAX_ROWS,
    NextInput,
    SplitScratch,
    SplitShape,
    scratch_sizes,
    split_linear,
)

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture(params=["counted", "awaited"])
def parts(request, monkeypatch):
    """How the program that adds the parts of a tile knows them."""
    limit = 0 if request.param == "counted" else 1 << 20
    monkeypatch.setattr("engine.kernels.triton.split_linear._AWAITED_BYTES", limit)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("rows", "splits"), [(2, 1), (2, 3), (17, 2)])
@pytest.mark.parametrize("fused", ["plain", "gated", "residual", "bias"])
def test_split_linear(device, rows, splits, fused):
    n, k = 96, 448
    x = torch.randn(rows, k, device=device).to(HALF)
    gated = fused == "gated"
    weight = (torch.randn(2 * n if gated else n, k, device=device) / k**0.5).to(HALF)
    bias = torch.randn(n, device=device).to(HALF) if fused == "bias" else None
    out = torch.randn(rows, n, device=device).to(HALF)
    residual = out if fused == "residual" else None
    want = x.double() @ weight.double().T
    if gated:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    if bias is not None:
        want = want + bias.double()
    if residual is not None:
        want = want + residual.double()
    shape = SplitShape(block_n=32, block_k=64, splits=splits, stages=2, warps=4)
    scratch = SplitScratch(device, *scratch_sizes(rows, n, gated, shape))
    for _ in range(2):  # the second launch finds the scratch as the first did
        got = out.clone()
        added = got if fused == "residual" else None
        split_linear(x, weight, scratch, shape, out=got, bias=bias, residual=added, gated=gated)
        assert (got.double() - want).norm() / want.norm() < 1e-2
    assert not scratch.arrived.any()
    assert (scratch.awaited.view(torch.int32) == -1).all()


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_products_takes_no_kernel(device, rows, splits, gated):
    hidden, n, k = 96, 64, 128
    cut = SplitShape(block_n=32, block_k=32, splits=splits, stages=2, warps=4)
    sizes = zip(
        scratch_sizes(rows, hidden, False, cut), scratch_sizes(rows, n, gated, cut), strict=True
    )
    scratch = SplitScratch(device, *map(max, sizes))
    x = torch.randn(rows, k, device=device).to(HALF)
    h = (3.0 * torch.randn(rows, hidden, device=device)).to(HALF)
    first = (torch.randn(hidden, k, device=device) / k**0.5).to(HALF)
    second = torch.randn(2 * n if gated else n, hidden, device=device) / hidden**0.5
    second = second.to(HALF)
    gain = torch.rand(hidden, device=device).to(HALF)
    following = NextInput(
        gain=gain,
        x=torch.empty(rows, hidden, device=device, dtype=HALF),
        squares=torch.full((hidden // 32, MAX_ROWS), float("nan"), device=device),
    )
    wide = h.double() + x.double() @ first.double().T
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    want = normed @ second.double().T
    if gated:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    split_linear(x, first, scratch, cut, out=h, residual=h, following=following)
    assert (h.double() - wide).norm() / wide.norm() < 1e-2
    out = torch.full((rows, n), float("nan"), device=device).to(HALF)
    split_linear(
        following.x, second, scratch, cut,
        out=out, squares=following.squares, eps=1e-5, gated=gated,
    )  # fmt: skip
    assert (out.double() - want).norm() / want.norm() < 1e-2


@pytest.mark.usefixtures("parts")
def test_a_damaged_row_is_seen_in_the_sum_of_parts(device):
    x = torch.randn(2, 192, device=device).to(HALF)
    x[1, 100] = float("nan")
    weight = torch.randn(32, 192, device=device).to(HALF)
    shape = SplitShape(block_n=32, block_k=64, splits=3, stages=2, warps=4)
    scratch = SplitScratch(device, *scratch_sizes(2, 32, False, shape))
    out = torch.zeros(2, 32, device=device, dtype=HALF)
    split_linear(x, weight, scratch, shape, out=out)
    assert out.isnan().all(1).tolist() == [False, True]
    assert out[0].isfinite().all()
