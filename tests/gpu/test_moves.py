"""Sequences move between two decode workers on GPUs, and one of them takes another role: the
tokens stay, and nothing is left behind. Both may share one GPU."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from kv_transfer.config import BackendName, TransferConfig
from protocol.ids import RequestKey, Role
from protocol.messages import MoveRequest, RoleCommand, Submit, Ticket
from protocol.sampling import SamplingParams
from rpc import methods
from tests.gpu.chaos import MARGIN, SHAPE
from tests.gpu.chaos_worker import Process
from tests.support.pair import SCHEDULERS, SECRET, Answer, FakeRouter
from tests.support.tiny import save_tiny_llama
from worker_runtime.config import WorkerConfig
from worker_runtime.worker import WorkerSettings

NUM_TOKENS = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


def settings_for(number: int, model: str, device: str, backend: str) -> WorkerSettings:
    return WorkerSettings(
        worker_id=f"decode-{number}",
        role=Role.DECODE,
        schedulers=SCHEDULERS,
        engine=EngineConfig(
            model_path=model,
            dtype="float32",
            device=device,
            num_blocks=2048,
            num_threads=1 if device == "cpu" else None,
            max_step_tokens=512,
        ),
        worker=WorkerConfig(
            max_num_seqs=32, max_num_batched_tokens=512, enable_prefix_caching=False
        ),
        transfer=TransferConfig(backend=BackendName(backend)),
        secret=SECRET,
    )


class Pair:
    """Two workers in processes of their own, and the router in front of them."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes
        self.router = FakeRouter()

    async def start(self) -> None:
        refs = await asyncio.gather(*(process.do("start") for process in self.processes))
        for process, ref in zip(self.processes, refs, strict=True):
            process.ref = ref
            await self.router.watch(ref)

    async def call(self, process: Process, method: Any, request: Any) -> None:
        await self.router.pool.get(process.ref.address).call(method, request, timeout_s=20)

    async def submit(self, prompt: list[int]) -> RequestKey:
        return await self.router.submit(prompt, GREEDY, self.processes[0].ref, None)

    async def move(self, key: RequestKey, prompt: list[int]) -> RequestKey:
        """From the first worker to the second."""
        source, target = self.processes
        known = tuple(self.router.answers[key].ids())
        to = RequestKey(key.request_id, key.attempt + 1)
        self.router.answers[to] = Answer()
        ticket = Ticket(
            key=to,
            sender_epoch=source.ref.epoch,
            receiver_epoch=target.ref.epoch,
            num_blocks=-(-(len(prompt) + NUM_TOKENS) // 16),
            lifetime_s=60.0,
        ).signed(SECRET)
        arriving = Submit(
            key=to,
            router_id=self.router.router_id,
            prompt_ids=tuple(prompt),
            output_ids=known,
            sampling=GREEDY,
            time_left_s=60.0,
            peer=source.ref,
            ticket=ticket,
            live=True,
        )
        await self.call(target, methods.SUBMIT, arriving)
        leaving = MoveRequest(key=key, to=to, ticket=ticket, num_output=len(known), peer=target.ref)
        await self.call(source, methods.MOVE, leaving)
        return to


def stable(answer: Answer) -> list[int]:
    """The tokens before the first that rounding may decide."""
    found = []
    for index, token in sorted(answer.tokens.items()):
        first, second = answer.logprobs[index].top_logprobs  # type: ignore[union-attr]
        if first - second < MARGIN:
            break
        found.append(token)
    return found


async def check(pair: Pair) -> None:
    source = random.Random(4)
    vocab = SHAPE["vocab_size"]
    prompts = [[source.randrange(vocab) for _ in range(200 + 150 * i)] for i in range(8)]
    await pair.start()
    keys = [await pair.submit(prompt) for prompt in prompts]
    expected = [stable(await pair.router.answer(key)) for key in keys]
    assert sum(map(len, expected)) > 4 * NUM_TOKENS

    keys = [await pair.submit(prompt) for prompt in prompts]
    answers = [pair.router.answers[key] for key in keys]
    while min(len(answer.tokens) for answer in answers) < 50:
        await asyncio.sleep(0.001)
    moved = await asyncio.gather(
        *(pair.move(key, prompt) for key, prompt in zip(keys, prompts, strict=True))
    )
    gaps = []
    for key, to, wanted in zip(keys, moved, expected, strict=True):
        there, here = await pair.router.answer(to), pair.router.answers[key]
        assert not here.failures
        assert not there.failures
        assert not here.tokens.keys() & there.tokens.keys()
        tokens = here.tokens | there.tokens
        assert sorted(tokens) == list(range(NUM_TOKENS))
        assert [tokens[index] for index in range(len(wanted))] == wanted
        gaps.append(there.arrivals[0] - here.arrivals[-1])
    print(f"\ngaps of 8 moves at once, ms: {sorted(round(1000 * gap, 1) for gap in gaps)}")

    changed = time.monotonic()
    await pair.call(pair.processes[1], methods.ROLE, RoleCommand(role=Role.PREFILL))
    decode, prefill = (process.ref for process in pair.processes)
    key = await pair.router.submit(prompts[5], GREEDY, decode, prefill)
    answer = pair.router.answers[key]
    while not answer.tokens:
        await asyncio.sleep(0.0005)
    print(f"first token by the new role after {1000 * (time.monotonic() - changed):.0f} ms")
    assert stable(await pair.router.answer(key))[: len(expected[5])] == expected[5]
    for _ in range(100):
        left = [(await process.do("figures"))["left"] for process in pair.processes]
        if left == [[0] * 5] * 2:
            break
        await asyncio.sleep(0.05)
    assert left == [[0] * 5] * 2


async def run(folder: Path, *, device: str, backend: str, gpus: tuple[str, str]) -> None:
    model = save_tiny_llama(folder, **SHAPE)
    processes = [
        Process(Role.DECODE, settings_for(number, model, device, backend), [gpu])
        for number, gpu in enumerate(gpus)
    ]
    pair = Pair(processes)
    try:
        await check(pair)
        assert await asyncio.gather(*(process.do("stop") for process in processes)) == [[], []]
    finally:
        await pair.router.close()
        for process in processes:
            process.kill()


@pytest.mark.parametrize("backend", ["cuda_ipc", "nccl"])
def test_sequences_move_and_a_worker_takes_another_role(tmp_path: Path, backend: str) -> None:
    second = "1" if torch.cuda.device_count() > 1 else "0"
    if backend == "nccl" and second == "0":
        pytest.skip("NCCL needs two GPUs")
    asyncio.run(run(tmp_path, device="cuda", backend=backend, gpus=("0", second)))
