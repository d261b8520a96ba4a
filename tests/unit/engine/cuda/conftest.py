"""The CUDA engine runs on a GPU when there is one, else in triton's interpreter on the CPU."""

import pytest

from engine.cuda.options import StepLevel

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Kernels read nothing that was not written."""


@pytest.fixture
def few_programs(device, monkeypatch):
    """The interpreter runs programs one after another: a context is cut for a small card."""
    if device.type == "cpu":
        monkeypatch.setattr("engine.kernels.triton.attention._WAVE", 40)
        monkeypatch.setattr("engine.cuda.memory.CHUNK_WAVE", 12)
        levels = [
            StepLevel(decode_programs=decodes, samples=samples, spare=spare, packed_spare=0)
            for decodes, samples, spare in ((0, 16, 6), (40, 96, 6), (100, 512, 29))
        ]
        monkeypatch.setattr("engine.cuda.options._MIXED_LEVELS", levels)
