"""The tokens that leave a real cluster are those of transformers on the same weights (float32)."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.conftest import CHUNK, CHUNKED, Baton
from tests.cluster.load import ask_all
from tests.support.prompts import prompts
from tests.support.smollm2 import TeacherForced


@pytest.mark.timeout(900)
async def test_fifty_prompts_of_1_to_1500_tokens(baton: Baton, oracle: TeacherForced) -> None:
    asked = prompts(50, chunk=CHUNK, longest=1500)
    settings = ("model.dtype=float32", "prefill.engine.kv_memory_bytes=1GiB")
    await asyncio.to_thread(baton.up, "local-cpu.yaml", *CHUNKED, *settings)
    outputs = await ask_all(baton, asked, 64)
    await asyncio.to_thread(baton.run, "down")
    assert [len(output) for output in outputs] == [64] * 50
    assert oracle.differences(asked, outputs) == {}
