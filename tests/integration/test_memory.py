"""What a request leaves in memory when it is over: nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from engine.cpu import inputs
from kv_tiers.config import TierConfig
from kv_transfer.config import TransferConfig
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig

CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=128)
#: What both sides remember of ended hand-offs is bounded; the bound is soon reached here.
TRANSFER = TransferConfig(finished_handoffs=32)
NUM_REQUESTS = 150


async def serve(stack: Stack, chance: random.Random) -> None:
    """Requests with prompts of their own, streamed and not; every fifth client leaves early. At the
    end their connections are closed: those belong to clients, not to requests."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        prompt = [chance.randrange(3, 500) for _ in range(chance.choice([1, 20, 40]))]
        body = {"prompt": prompt, "max_tokens": chance.choice([1, 3, 6]), "stream": number % 2 == 0}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        if number % 5 == 0:
            await asyncio.sleep(chance.random() * 0.02)
            call.cancel()
        await asyncio.wait([call])

    async with httpx.AsyncClient(base_url=f"http://{stack.http}", timeout=60) as client:
        for first in range(0, NUM_REQUESTS, 30):
            await asyncio.gather(*(one(client, first + i) for i in range(30)))
    await stack.pair.idle()
    while stack.router.num_requests or connections(stack):
        await asyncio.sleep(0.01)


def connections(stack: Stack) -> int:
    """How many clients the HTTP front end still talks to."""
    server = stack.router._http._server
    assert server is not None
    return len(server.server_state.connections)


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
async def test_requests_leave_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_MAX_CHECKED", 32)  # block tables that are kept, as above
    write_model_text(tmp_path)
    save_tiny_llama(tmp_path, vocab_size=512)
    chance = random.Random(5)
    async with running_stack(
        str(tmp_path),
        prefill_config=CONFIG,
        decode_config=CONFIG,
        transfer=TRANSFER,
        prefill_blocks=48,
        decode_blocks=48,
        tiers=TierConfig(host_bytes=1 << 19),  # full after a few requests
    ) as stack:
        tracemalloc.start()
        try:
            readings = []
            for _ in range(4):
                await serve(stack, chance)
                readings.append(traced())
        finally:
            tracemalloc.stop()
    # What requests leave, they leave in every round; what fills up to a bound, or comes and goes,
    # does not.
    growth = min(after - before for before, after in pairwise(readings)) / NUM_REQUESTS
    assert growth < 200, f"{growth:.0f} bytes a request"
