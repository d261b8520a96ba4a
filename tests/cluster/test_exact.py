"""The tokens that leave a real cluster are those of transformers on the same weights (float32)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.conftest import MODEL, Baton
from tests.support.doors import Doors
from tests.support.prompts import prompts
from tests.support.smollm2 import TeacherForced

CHUNK = 128
EXACT = (
    "model.dtype=float32",
    f"prefill.worker.max_num_batched_tokens={CHUNK}",
    f"decode.worker.max_num_batched_tokens={CHUNK}",
    "router.settings.local_prefill_tokens=0",
    "prefill.engine.kv_memory_bytes=1GiB",
)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> TeacherForced:
    return TeacherForced(model_path)


async def ask_all(baton: Baton, asked: list[list[int]], tokens: int) -> list[list[int]]:
    """Every prompt once, alternating between the doors, sixteen at a time."""
    state = baton.state()
    doors = Doors(str(state["http"]), str(state["grpc"]), MODEL)
    limit = asyncio.Semaphore(16)

    async def ask(number: int) -> list[int]:
        async with limit:
            door = doors.over_grpc if number % 2 else doors.over_http
            return await door(asked[number], tokens, temperature=0.0)

    try:
        return await asyncio.gather(*(ask(i) for i in range(len(asked))))
    finally:
        await doors.close()


def differences(
    oracle: TeacherForced, asked: list[list[int]], outputs: list[list[int]]
) -> dict[tuple[int, int], str]:
    """Where an output is not the greedy one, by number and length of the prompt."""
    found = {}
    for number, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
        difference = oracle.first_difference(prompt, output)
        if difference is not None:
            found[number, len(prompt)] = difference
    return found


@pytest.mark.timeout(900)
async def test_fifty_prompts_of_1_to_1500_tokens(baton: Baton, oracle: TeacherForced) -> None:
    asked = prompts(50, chunk=CHUNK, longest=1500)
    await asyncio.to_thread(baton.up, "local-cpu.yaml", *EXACT)
    outputs = await ask_all(baton, asked, 64)
    await asyncio.to_thread(baton.run, "down")
    assert [len(output) for output in outputs] == [64] * 50
    assert differences(oracle, asked, outputs) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 3), (3, 1)])
async def test_between_tensor_parallel_degrees(
    baton: Baton, oracle: TeacherForced, prefill_tp: int, decode_tp: int
) -> None:
    asked = prompts(9, chunk=CHUNK, longest=3 * CHUNK + 7)
    degrees = (f"prefill.engine.tp_size={prefill_tp}", f"decode.engine.tp_size={decode_tp}")
    threads = ("prefill.engine.num_threads=1", "decode.engine.num_threads=1")
    await asyncio.to_thread(baton.up, "local-cpu.yaml", *EXACT, *degrees, *threads)
    outputs = await ask_all(baton, asked, 24)
    assert differences(oracle, asked, outputs) == {}
