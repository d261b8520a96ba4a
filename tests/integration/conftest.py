"""Workers of a tiny model, and the real small one. All runs on the loop that Ray Serve uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import uvloop

from tests.support.pair import SMALL_STEPS, Pair, running_pair
from tests.support.smollm2 import ABSENT, model_folder
from tests.support.tiny import Oracle, save_tiny_llama


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model: str) -> Oracle:
    return Oracle(model)


@pytest.fixture
async def pair(model: str) -> AsyncIterator[Pair]:
    async with running_pair(model, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS) as pair:
        yield pair


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = model_folder()
    if folder is None:
        pytest.skip(ABSENT)
    return folder
