import pytest
import torch

from engine.kernels.triton.linear import LinearShape, linear, shared_linear
from engine.kernels.triton.reduce import Mailboxes, Reduction

#: The interpreter has no bfloat16 products.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SHAPES = [
    LinearShape(block_n=8, block_k=64, stages=1, warps=4),
    LinearShape(block_n=16, block_k=128, stages=3, warps=4),
    LinearShape(block_n=4, block_k=64, stages=1, warps=4, ahead=2),
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


@pytest.mark.parametrize(("rank", "size", "bias"), [(0, 2, True), (1, 2, False), (2, 4, False)])
def test_shared_linear_pushes_its_sums_and_adds_those_of_all_ranks(device, rank, size, bias):
    """The peers are played by this test: their words are in the mailbox before the kernel looks."""
    n, k, done = 200, 100, 5
    boxes = [torch.zeros(2, size, 256, dtype=torch.int64, device=device) for _ in range(size)]
    group = Mailboxes(
        addresses=torch.tensor([box.data_ptr() for box in boxes], device=device),
        done=torch.full((1,), done, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=256,
        rank=rank,
        size=size,
    )
    h = torch.randn(1, n, device=device)
    for index in (0, 1, 2):
        epoch = done + index + 1
        x, weight = torch.randn(1, k, device=device), torch.randn(n, k, device=device)
        b = torch.randn(n, device=device) if bias else None
        parts = torch.randn(size, n, device=device)
        parts[rank] = (x @ weight.T)[0] + (0.0 if b is None else b)
        words = parts.view(torch.int32).long() & 0xFFFFFFFF | epoch << 32
        for peer in set(range(size)) - {rank}:
            boxes[rank][epoch % 2, peer, :n] = words[peer]
        want = h + parts.sum(0)
        shared_linear(x, weight, Reduction(boxes=group, index=index), h=h, bias=b, shape=SHAPES[0])
        torch.testing.assert_close(h, want, rtol=1e-5, atol=1e-4)
        for box in boxes:
            sent = box[epoch % 2, rank, :n]
            assert torch.equal(sent >> 32, torch.full_like(sent, epoch))
            assert torch.equal(sent, boxes[0][epoch % 2, rank, :n])
            got = (sent & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
            torch.testing.assert_close(got, parts[rank], rtol=1e-5, atol=1e-4)
    assert int(group.failed) == 0


def test_a_silent_peer_is_given_up_and_told(device, monkeypatch):
    monkeypatch.setattr("engine.kernels.triton.reduce.MAX_POLLS", 3)
    boxes = [torch.zeros(2, 2, 256, dtype=torch.int64, device=device) for _ in range(2)]
    group = Mailboxes(
        addresses=torch.tensor([box.data_ptr() for box in boxes], device=device),
        done=torch.zeros(1, dtype=torch.int32, device=device),
        failed=torch.zeros(1, dtype=torch.int32, device=device),
        capacity=256,
        rank=0,
        size=2,
    )
    x, weight, h = (torch.ones(n, 64, device=device) for n in (1, 64, 1))
    shared_linear(x, weight, Reduction(boxes=group, index=0), h=h, shape=SHAPES[0])
    assert int(group.failed) == 1
