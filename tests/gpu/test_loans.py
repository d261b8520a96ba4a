"""KV that one worker on a GPU takes from another, in processes of their own: the same tokens, and
nothing is left behind. Both may share one GPU."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from kv_tiers.config import TierConfig
from protocol.ids import Role
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from tests.gpu.chaos import SHAPE
from tests.gpu.chaos_worker import Process
from tests.gpu.test_moves import Pair, settings_for, stable
from tests.support.pair import Answer
from tests.support.tiny import save_tiny_llama

OUTPUT = 40
#: Its prompts take several times as long to compute as their KV, 16 KiB a token, takes to come.
LOANED = {**SHAPE, "hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 2}
LOGGED = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=2)


async def check(pair: Pair, vocab: int, *, num_prompts: int, num_tokens: int) -> None:
    """Prompts that the first worker has computed begin on the second."""
    source = random.Random(5)
    holder, borrower = pair.processes
    await pair.start()

    async def ask(process: Process, prompt: list[int], lender: Process | None = None) -> Answer:
        count = len(prompt) // 16 * 16
        key = await pair.router.submit(
            prompt,
            LOGGED,
            process.ref,
            None,
            source=None if lender is None else (lender.ref, count),
        )
        return await pair.router.answer(key)

    def prompt() -> list[int]:
        return [source.randrange(vocab) for _ in range(num_tokens + 5)]

    for process in pair.processes:  # the model of a step's time, and the first link
        for _ in range(3):
            await ask(process, prompt())
    for _ in range(2):
        first = prompt()
        await ask(holder, first)
        await ask(borrower, first, holder)
    loads = []
    for _ in range(num_prompts):
        asked = prompt()
        computed = await ask(holder, asked)
        borrowed = await ask(borrower, asked, holder)
        assert borrowed.cached == num_tokens
        wanted = stable(computed)
        assert borrowed.ids()[: len(wanted)] == wanted
        assert not borrowed.failures
        (span,) = [s for s in borrowed.spans if s.phase is Phase.KV_LOAD]
        assert span.counts == {"peer_tokens": num_tokens}
        loads.append(span.end - span.start)
    times = f"{1e3 * median(loads):.2f}, least {1e3 * min(loads):.2f}"
    print(f"\nloan of {num_tokens} tokens, ms: {times}")
    for _ in range(100):
        left = [(await process.do("figures"))["left"] for process in pair.processes]
        if left == [[0] * 5] * 2:
            break
        await asyncio.sleep(0.05)
    assert left == [[0] * 5] * 2


async def run(
    folder: Path,
    *,
    device: str,
    backend: str,
    gpus: tuple[str, str],
    shape: dict[str, Any] = LOANED,
    dtype: str = "float32",
    num_prompts: int = 6,
    num_tokens: int = 4096,
) -> None:
    model = save_tiny_llama(folder, **shape)
    processes = []
    for number, gpu in enumerate(gpus):
        settings = settings_for(number, model, device, backend)
        settings = replace(
            settings,
            engine=replace(settings.engine, dtype=dtype, num_blocks=(num_tokens // 16 + 8) * 12),
            worker=replace(settings.worker, enable_prefix_caching=True),
            tiers=TierConfig(host_bytes=0),
        )
        processes.append(Process(Role.DECODE, settings, [gpu]))
    pair = Pair(processes)
    try:
        await check(pair, shape["vocab_size"], num_prompts=num_prompts, num_tokens=num_tokens)
        assert await asyncio.gather(*(process.do("stop") for process in processes)) == [[], []]
    finally:
        await pair.router.close()
        for process in processes:
            process.kill()


@pytest.mark.parametrize("backend", ["cuda_ipc", "nccl"])
def test_a_worker_takes_kv_from_another(tmp_path: Path, backend: str) -> None:
    second = "1" if torch.cuda.device_count() > 1 else "0"
    if backend == "nccl" and second == "0":
        pytest.skip("NCCL needs two GPUs")
    asyncio.run(run(tmp_path, device="cuda", backend=backend, gpus=("0", second)))
