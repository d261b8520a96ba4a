"""Tiny models shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny import save_tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four query and two KV heads, untied, 128 tokens."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"
