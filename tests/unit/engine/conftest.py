"""Tiny models shared by the engine's tests, and where kernels run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.tiny import save_tiny_llama

if os.environ.get("TRITON_INTERPRET"):
    from tests.support.interpreter import patch_language_once, remember_types, round_e4m3_exactly

    patch_language_once()
    remember_types()
    round_e4m3_exactly()


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four query and two KV heads, untied, 128 tokens."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the kernels' tests: a GPU when there is one, else the CPU and triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
