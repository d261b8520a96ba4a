import pytest
import torch

from engine.kernels.triton_linear import LinearShape, linear

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SHAPES = [
    LinearShape(block_n=8, block_k=64, stages=1, warps=4),
    LinearShape(block_n=16, block_k=128, stages=3, warps=4),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("n", "k"), [(48, 256), (40, 100)])
@pytest.mark.parametrize("fused", ["plain", "norm", "gated", "residual", "bias"])
def test_linear(device, dtype, n, k, fused):
    x = torch.randn(1, k, device=device).to(dtype)
    gated = fused == "gated"
    weight = (torch.randn(2 * n if gated else n, k, device=device) / k**0.5).to(dtype)
    gain = torch.rand(k, device=device).to(dtype) if fused in ("norm", "gated") else None
    residual = torch.randn(1, n, device=device).to(dtype) if fused == "residual" else None
    bias = torch.randn(n, device=device).to(dtype) if fused == "bias" else None
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    want = wide @ weight.double().T
    if gated:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    if bias is not None:
        want = want + bias.double()
    if residual is not None:
        want = want + residual.double()
    for shape in SHAPES:
        out = torch.full((1, n), float("nan"), device=device).to(dtype)
        linear(
            x, weight, out=out, bias=bias, gain=gain, eps=1e-5, residual=residual,
            gated=gated, shape=shape,
        )  # fmt: skip
        error = (out.double() - want).norm() / want.norm()
        assert error < (2e-6 if dtype == torch.float32 else 1e-2)
