"""Launches past triton give what those through it gave, whatever the addresses."""

import pytest
import torch

from engine.kernels.triton import elementwise as elementwise


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_repeated_launches_are_right_for_tensors_of_any_alignment(device, offset):
    gain = torch.rand(256, device=device, dtype=torch.bfloat16)
    for rows in (1, 7, 300):
        flat = torch.randn(rows * 256 + offset, device=device, dtype=torch.bfloat16)
        x = flat[offset:].view(rows, 256)
        for _ in range(2):
            out = torch.empty(rows, 256, device=device, dtype=torch.bfloat16)
            elementwise.rms_norm(x, gain, 1e-5, out=out)
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            torch.testing.assert_close(
                out.float(), wide * scale * gain.float(), rtol=2e-2, atol=2e-2
            )
