"""The CUDA engine runs on a GPU when there is one, else in triton's interpreter on the CPU."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Kernels read nothing that was not written."""


@pytest.fixture
def few_programs(device, monkeypatch):
    """The interpreter runs programs one after another: a context is cut for a small card."""
    if device.type == "cpu":
        for module in ("attention", "splits"):
            monkeypatch.setattr(f"engine.kernels.triton.{module}.WAVE", 40)
        levels = ((0, 60, 16), (40, 60, 96), (100, 200, 512))
        monkeypatch.setattr("engine.cuda.options._MIXED_LEVELS", levels)
