"""Kernel tests run on a GPU when there is one, else in triton's interpreter on the CPU."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Kernels read nothing that was not written."""
