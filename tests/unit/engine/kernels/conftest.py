"""Kernel tests run on a GPU when there is one, else in triton's interpreter on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)
