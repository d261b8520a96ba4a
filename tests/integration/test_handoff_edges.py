"""Where hand-offs meet limits: the same answers as from one worker alone, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from router.server import Router
from tests.support.pair import SECRET, Pair
from tests.support.stack import running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import FINISHED

CONTEXT = 128
CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=32, watermark=0.0)


@dataclass
class FrontEnds:
    """HTTP of a router over both pools, and of one that knows the decode worker only."""

    split: httpx.AsyncClient
    alone: httpx.AsyncClient
    pair: Pair
    router: Router

    async def ask(self, body: dict[str, Any], *, alone: bool = False) -> tuple[int, Any]:
        """Status and what the answer says, without what differs from call to call."""
        client = self.alone if alone else self.split
        answer = await client.post(
            "/v1/completions", json={"ignore_eos": True, "return_token_ids": True} | body
        )
        said = answer.json()
        if answer.status_code != 200:
            return answer.status_code, said["error"]
        choices = [(c["index"], tuple(c["token_ids"]), c["finish_reason"]) for c in said["choices"]]
        usage = said["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        assert 0 <= cached <= usage["prompt_tokens"]
        return 200, (choices, usage["prompt_tokens"], usage["completion_tokens"])

    async def idle(self) -> None:
        """Nothing may be left anywhere."""
        await self.pair.idle()
        async with asyncio.timeout(60):
            while self.router.num_requests:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    write_model_text(path, context=CONTEXT)
    return save_tiny_llama(path, vocab_size=512, max_position_embeddings=CONTEXT)


@asynccontextmanager
async def running_front_ends(
    model: str, decode_config: WorkerConfig = CONFIG
) -> AsyncIterator[FrontEnds]:
    """Pools for one prompt and a half of full length."""
    async with running_stack(
        model,
        prefill_config=replace(CONFIG, hold_first_s=3600.0),  # decode sends their first tokens
        decode_config=decode_config,
        prefill_blocks=6,
        decode_blocks=12,
        block_sizes=(32, 16),
    ) as stack:
        alone = Router(RouterConfig(model_path=model, served_model_name="tiny"), secret=SECRET)
        addresses = await alone.start(
            http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
        )
        alone.set_workers(stack.pair.decode_refs)
        async with asyncio.timeout(60):
            while not alone.ready:
                await asyncio.sleep(0.01)
        clients = [
            httpx.AsyncClient(base_url=f"http://{address}", timeout=60)
            for address in (stack.http, addresses.http)
        ]
        yield FrontEnds(*clients, pair=stack.pair, router=stack.router)
        for client in clients:
            await client.aclose()
        await alone.stop()


@pytest.fixture
async def front_ends(model: str) -> AsyncIterator[FrontEnds]:
    async with running_front_ends(model) as front_ends:
        yield front_ends


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * i + 13 * seed) % 500 for i in range(length)]


async def test_around_the_context_both_say_the_same(front_ends: FrontEnds) -> None:
    """Prompts and sums of prompt and output around the longest, between requests that fit."""
    bodies: list[dict[str, Any]] = []
    for length in (1, 31, 32, 33, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1, 4 * CONTEXT):
        left = CONTEXT - length
        for max_tokens in sorted({left - 1, left, left + 1, 1}):
            if max_tokens >= 1:
                bodies.append({"prompt": prompt_of(length), "max_tokens": max_tokens})
    for body in bodies:
        body["temperature"] = 0.0
    split = await asyncio.gather(*map(front_ends.ask, bodies))
    alone = [await front_ends.ask(body, alone=True) for body in bodies]
    assert split == alone
    statuses = {status for status, _ in split}
    assert statuses == {200, 400}
    for body, (status, said) in zip(bodies, split, strict=True):
        fits = len(body["prompt"]) + body["max_tokens"] <= CONTEXT
        assert (status == 200) is fits, body
        if not fits:
            assert (said["code"], said["param"]) in {
                ("context_length_exceeded", "prompt"),
                ("context_length_exceeded", "max_tokens"),
            }
    await front_ends.idle()


async def test_several_outputs_of_many_prompts_at_once(front_ends: FrontEnds) -> None:
    """Every choice comes, with its index; some clients leave on the way."""
    bodies = [
        {"prompt": prompt_of(20 + i, i), "max_tokens": 6, "n": 3, "temperature": 0.9, "seed": i}
        for i in range(24)
    ]
    tasks = [asyncio.create_task(front_ends.ask(body)) for body in bodies]
    await asyncio.sleep(0.3)
    for task in tasks[::4]:
        task.cancel()
    await asyncio.wait(tasks)
    for number, (body, task) in enumerate(zip(bodies, tasks, strict=True)):
        if task.cancelled():
            assert number % 4 == 0
            continue
        status, (choices, prompt_tokens, output_tokens) = task.result()
        assert (status, [index for index, _, _ in choices]) == (200, [0, 1, 2])
        assert (prompt_tokens, output_tokens) == (20 + number, 18)
        if number < 3:
            assert (await front_ends.ask(body, alone=True))[1][0] == choices
    await front_ends.idle()


async def test_fields_that_bound_the_output_hold_on_both_sides(front_ends: FrontEnds) -> None:
    plain = {"prompt": prompt_of(40), "temperature": 0.0}
    eos = plain | {"ignore_eos": False, "logit_bias": {"2": 100}}
    cases = [
        plain | {"min_tokens": 30, "max_tokens": 50},
        eos | {"max_tokens": 50},  # token 1 is an end
        eos | {"min_tokens": 1, "max_tokens": 50},
        eos | {"min_tokens": 30, "max_tokens": 50},
        eos | {"min_tokens": 50, "max_tokens": 50},
        plain | {"max_tokens": 1},
        plain | {"max_tokens": 1, "n": 3},
    ]
    split = [await front_ends.ask(body) for body in cases]
    assert split == [await front_ends.ask(body, alone=True) for body in cases]
    counts = [said[2] for _, said in split]
    assert counts[0] == 50
    assert counts[4] == 50
    assert counts[5:] == [1, 3]
    assert [said[0][0][2] for _, said in split[1:3]] == ["stop", "stop"]
    await front_ends.idle()


@pytest.mark.parametrize("cached_on", ["prefill", "both"])
async def test_the_same_prompt_over_and_over_fills_no_pool(model: str, cached_on: str) -> None:
    """Nothing to compute, and with both caches nothing to send."""
    decode = replace(CONFIG, enable_prefix_caching=cached_on == "both")
    async with running_front_ends(model, decode_config=decode) as front_ends:
        body = {"prompt": prompt_of(96), "max_tokens": 4, "temperature": 0.0}
        first = await front_ends.ask(body)
        for _ in range(3):
            assert await asyncio.gather(*(front_ends.ask(body) for _ in range(8))) == [first] * 8
        await front_ends.idle()
        handed_over = front_ends.pair.prefills[0].status().counters[FINISHED]
        assert handed_over == (25 if cached_on == "prefill" else 1)


async def test_prompts_that_do_not_fit_at_once_follow_one_another(front_ends: FrontEnds) -> None:
    """Each worker has blocks for one and a half requests: none waits forever."""
    bodies = [
        {"prompt": prompt_of(100, seed), "max_tokens": 20, "temperature": 0.0} for seed in range(7)
    ]
    bodies += [{"prompt": prompt_of(10, 9), "max_tokens": 8, "temperature": 0.0}]
    split = await asyncio.gather(*map(front_ends.ask, bodies))
    assert split == [await front_ends.ask(body, alone=True) for body in bodies]
    assert {status for status, _ in split} == {200}
    await front_ends.idle()
