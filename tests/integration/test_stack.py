"""Router and workers together, no Ray: both front ends, real hand-offs, loss of workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.front_ends import FrontEnds
from tests.support.pair import Brake
from tests.support.prompts import prompts
from tests.support.smollm2 import TeacherForced
from tests.support.stack import Stack, running_stack
from tests.support.tiny import Oracle, save_tiny_llama
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import FINISHED

CHUNK = 128
CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=CHUNK)


@pytest.mark.slow
async def test_real_model_over_both_front_ends_equals_transformers(smollm2: Path) -> None:
    """With blocks of another size on either side of the hand-off."""
    asked = prompts(8, chunk=CHUNK, longest=3 * CHUNK + 7)
    async with running_stack(
        str(smollm2), prefill_config=CONFIG, decode_config=CONFIG, block_sizes=(32, 16)
    ) as stack:
        front_ends = FrontEnds(stack.http, stack.grpc, "tiny")
        outputs = await asyncio.gather(
            *(
                (front_ends.over_grpc if i % 2 else front_ends.over_http)(p, 16, temperature=0.0)
                for i, p in enumerate(asked)
            )
        )
        await front_ends.close()
        await stack.pair.idle()
        assert stack.pair.prefills[0].status().counters[FINISHED] == len(asked)
    assert [len(output) for output in outputs] == [16] * len(asked)
    assert TeacherForced(smollm2).differences(asked, outputs) == {}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> str:
    """A tiny model behind the real tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path, vocab_size=49_152)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((smollm2 / name).read_bytes())
    return str(path)


@pytest.fixture
async def stack(tiny: str) -> AsyncIterator[Stack]:
    async with running_stack(
        tiny, num_prefill=2, num_decode=2, prefill_config=CONFIG, decode_config=CONFIG
    ) as stack:
        yield stack


@pytest.fixture
async def front_ends(stack: Stack) -> AsyncIterator[FrontEnds]:
    front_ends = FrontEnds(stack.http, stack.grpc, "tiny")
    yield front_ends
    await front_ends.close()


async def test_front_ends_agree_on_sampled_tokens_through_any_pair(front_ends: FrontEnds) -> None:
    prompt = list(range(100, 160))
    fields = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234}
    runs = [front_ends.over_grpc(prompt, 20, **fields) for _ in range(4)]
    runs += [front_ends.over_http(prompt, 20, **fields) for _ in range(4)]
    runs += [front_ends.over_http(prompt[: 20 + i], 20, **fields) for i in range(8)]
    outputs = await asyncio.gather(*runs)
    assert all(output == outputs[0] for output in outputs[:8])
    assert len({tuple(output) for output in outputs[8:]}) > 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_losing_a_worker_loses_no_request_and_repeats_no_token(
    stack: Stack, front_ends: FrontEnds, tiny: str, role: str
) -> None:
    oracle = Oracle(tiny)
    asked = [[100 + i] * (40 + i) for i in range(8)]
    running = [
        asyncio.create_task(
            (front_ends.over_grpc if i % 2 else front_ends.over_http)(p, 120, temperature=0.0)
        )
        for i, p in enumerate(asked)
    ]
    workers = stack.pair.prefills if role == "prefill" else stack.pair.decodes
    brake = Brake(stack.pair.decodes[0], 100)
    async with asyncio.timeout(60):
        while stack.pair.decodes[0].status().load.running == 0:
            await asyncio.sleep(0.005)
    brake.release()
    await workers.pop(0).stop()
    outputs = await asyncio.gather(*running)
    for prompt, output in zip(asked, outputs, strict=True):
        assert output == oracle.greedy(prompt, 120)
    await stack.pair.idle()
    assert stack.router.num_requests == 0


@pytest.mark.slow
async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind(
    stack: Stack, front_ends: FrontEnds
) -> None:
    rng = random.Random(3)

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 2.0)
        prompt = [rng.randrange(3, 49_000) for _ in range(rng.choice([1, 10, 60, 200]))]
        front_end = front_ends.over_grpc if number % 2 else front_ends.over_http
        run = asyncio.create_task(front_end(prompt, rng.choice([1, 8, 60]), temperature=1.0))
        if number % 3 == 0:
            await asyncio.sleep(rng.random() * 0.3)
            run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        if number % 3:
            assert run.exception() is None

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(one(number))
    await stack.pair.idle()
    async with asyncio.timeout(60):
        while stack.router.num_requests:
            await asyncio.sleep(0.01)
    for worker in (*stack.pair.prefills, *stack.pair.decodes):
        load = worker.status().load
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
        assert (load.held_blocks, load.quarantined_blocks) == (0, 0)
