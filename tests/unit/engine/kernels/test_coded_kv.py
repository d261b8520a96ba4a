"""KV as e4m3 codes on CPUs: each number becomes the nearest code, and codes are read as what they
mean, to the bit."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.base import Geometry
from engine.kernels.cpu.operations import CODES, CpuKernels
from engine.kernels.native import build, kernels
from tests.unit.engine.kernels.native.test_kernels import NUM_BLOCKS, step_of

BF16 = torch.bfloat16
needs_library = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler, or a processor without AVX-512 BF16"
)


def made(kind: type, dtype: torch.dtype = BF16, heads: tuple[int, int] = (6, 2), dim: int = 64):
    return kind(
        Geometry(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dim,
            block_size=16,
            scale=0.125,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize(
    "kind", [CpuKernels, pytest.param(kernels.NativeKernels, marks=needs_library)]
)
def test_every_number_becomes_the_nearest_code(kind):
    """All 65536 bfloat16 as values of one chunk."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    numbers = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).short().view(BF16)
    inputs = step_of([(0, 512)], 16)
    qkv = torch.zeros(512, 6 + 2 + 2, 64, dtype=BF16)
    qkv[:, 8:] = numbers.view(512, 2, 64)
    pool = torch.zeros(NUM_BLOCKS, 2, 2, 16, 64, dtype=torch.uint8).view(CODES)
    ours = made(kind)
    table = torch.ones(600, 32), torch.zeros(600, 32)
    ours.rope_and_write_kv(qkv.flatten(1), pool, ours.prepare(inputs, *table))
    got = pool.view(torch.uint8)[list(inputs.block_ids[0])][:, 1]
    got = got.transpose(1, 2).flatten(0, 1).view(CODES).float()
    exact = numbers.view(512, 2, 64).float()
    clamped = exact.clamp(-448, 448)
    assert torch.equal(got.isnan(), exact.isnan())
    levels = torch.arange(127, dtype=torch.uint8).view(CODES).double()
    size, given = got.abs().double().nan_to_num(), clamped.abs().double().nan_to_num()
    nearest = (levels[:, None] - given.flatten()[None]).abs().amin(0)
    assert torch.equal((size - given).abs().flatten(), nearest)
    kept = got.nan_to_num() != 0
    assert torch.equal(got[kept].sign(), clamped[kept].sign())
    assert torch.equal(got.nan_to_num(), clamped.to(CODES).float().nan_to_num())  # ties too


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "dim"),
    [
        (CpuKernels, torch.float32, (4, 2), 24),
        (CpuKernels, BF16, (6, 2), 64),
        pytest.param(kernels.NativeKernels, BF16, (9, 3), 64, marks=needs_library),
        pytest.param(kernels.NativeKernels, BF16, (2, 1), 96, marks=needs_library),
        pytest.param(kernels.NativeKernels, BF16, (4, 1), 256, marks=needs_library),
    ],
)
@pytest.mark.parametrize("window", [None, 21])
def test_attention_reads_what_codes_mean(kind, dtype, heads, dim, window):
    """All codes but those of no number, which only blocks that nothing sees hold."""
    torch.manual_seed(0)
    inputs = step_of([(70, 1), (3, 1), (20, 40), (0, 65)], 16)
    codes = torch.randint(0, 127, (NUM_BLOCKS, 2, heads[1], 16, dim), dtype=torch.uint8)
    codes += 128 * torch.randint_like(codes, 2)
    used = [block for table in inputs.block_ids for block in table]
    unused = [block for block in range(NUM_BLOCKS) if block not in used]
    codes[unused] = 127
    pool = codes.view(CODES)
    q = torch.randn(inputs.num_tokens, heads[0] + 2 * heads[1], dim).to(dtype) / 64
    ours = made(kind, dtype, heads, dim)
    plan = ours.prepare(inputs, torch.ones(200, dim // 2), torch.zeros(200, dim // 2), window)
    got = ours.paged_attention(q[:, : heads[0]], pool, plan)
    assert got.isfinite().all()
    assert torch.equal(got, ours.paged_attention(q[:, : heads[0]], pool.to(dtype), plan))
