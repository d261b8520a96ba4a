import pytest
import torch

from engine.kernels.triton_split_linear import (
    SplitScratch,
    SplitShape,
    scratch_sizes,
    split_linear,
)

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("splits", [1, 2, 3])
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
