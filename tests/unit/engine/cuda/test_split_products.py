"""A layer whose products run on the split kernel computes what it does with torch's."""

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner
from engine.kernels import triton_split_linear
from engine.kernels.triton_split_linear import SplitShape
from tests.support.cuda import HostSource, tiny_config

#: The interpreter has no bfloat16 products.
HALF = "bfloat16" if torch.cuda.is_available() else "float16"


@pytest.mark.parametrize("bias", [False, True])
def test_split_products_change_only_the_order_of_sums(device, monkeypatch, bias):
    cut = SplitShape(block_n=32, block_k=32, splits=2, stages=1, warps=4)
    keys = [(96, 96, False), (160, 96, True), (96, 160, False)]
    monkeypatch.setattr(triton_split_linear, "MIN_ROWS", 2)
    monkeypatch.setattr(triton_split_linear, "MEASURED", dict.fromkeys(keys, (cut, cut)))
    grids, kernel = [], triton_split_linear.kernel

    class Noted:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_split_linear, "kernel", Noted())
    results = []
    h, attended = (torch.randn(3, 96, device=device).to(getattr(torch, HALF)) for _ in range(2))
    for split in (False, True):
        runner = CudaRunner(
            EngineConfig(model_path="unused", dtype=HALF, device=str(device)),
            tiny_config(attention_bias=bias),
            HostSource(device, getattr(torch, HALF)),
            CudaOptions(max_batch=4, split_products=split),
        )
        assert grids == []
        out = h.clone()
        runner.model._finish(attended, out, runner.weights.layers[0])
        results.append(out)
    assert grids == [(3, 2), (5, 2), (3, 2)]  # output, gate and up, down
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)
