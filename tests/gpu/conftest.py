"""Tests that need CUDA devices; skipped, and reported, without them."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
