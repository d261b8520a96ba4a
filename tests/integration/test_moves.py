"""Running sequences move between decode workers with their KV: the tokens stay those of
transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from protocol.errors import ErrorCode
from protocol.ids import RequestKey, Role
from protocol.messages import MoveRequest, RoleCommand, Submit, Ticket
from protocol.sampling import SamplingParams
from rpc import methods
from tests.support.families import save_family
from tests.support.pair import SECRET, SMALL_STEPS, Answer, Brake, Pair, running_pair
from tests.support.prompts import random_ids
from tests.support.stack import Stack, running_stack
from tests.support.tiny import Oracle, save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import MOVED

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture
async def pair(model: str) -> AsyncIterator[Pair]:
    async with running_pair(
        model,
        num_decode=2,
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
        block_sizes=(16, 8),
    ) as pair:
        yield pair


async def start(
    pair: Pair, prompt: list[int], sampling: SamplingParams, brake: Brake | None = None
) -> Submit:
    """A request that decodes on the first worker, not to its end: what its router submitted."""
    brake = brake or Brake(pair.decodes[0], sampling.max_tokens - 10)
    key = await pair.router.submit(
        prompt, sampling, pair.decode_refs[0], None, layout=pair.decodes[0].status().layout
    )
    brake.keys.add(key)
    while len(pair.router.answers[key].tokens) < 3:
        await asyncio.sleep(0)
    return Submit(
        key=key,
        router_id=pair.router.router_id,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        time_left_s=60.0,
    )


async def move(
    pair: Pair, submit: Submit, source: int, target: int, *, tried: int = 0, **changes: Any
) -> RequestKey:
    """Move it, as a router does that has `tried` before; the key that it has there."""
    router, refs = pair.router, pair.decode_refs
    known = tuple(router.answers[submit.key].ids())
    to = RequestKey(submit.key.request_id, submit.key.attempt + 1 + tried)
    longest = len(submit.prompt_ids) + submit.sampling.max_tokens
    router.answers[to] = Answer()
    ticket = Ticket(
        key=to,
        sender_epoch=refs[source].epoch,
        receiver_epoch=refs[target].epoch,
        num_blocks=pair.decodes[target].status().layout.pages_for(longest),
        lifetime_s=60.0,
    ).signed(SECRET)
    arriving = replace(
        submit, key=to, output_ids=known, peer=refs[source], ticket=ticket, live=True
    )
    await router.pool.get(refs[target].address).call(methods.SUBMIT, arriving, timeout_s=60)
    leaving = MoveRequest(
        key=submit.key, to=to, ticket=ticket, num_output=len(known), peer=refs[target]
    )
    await router.pool.get(refs[source].address).call(
        methods.MOVE, replace(leaving, **changes), timeout_s=60
    )
    return to


async def merged(pair: Pair, *keys: RequestKey, count: int = 1) -> dict[int, int]:
    """The tokens of a sequence under all its keys, once at least `count` have come from its first
    on: those of two workers may come in any order."""
    found: dict[int, int] = {}
    async with asyncio.timeout(60):
        while len(found) < count or sorted(found) != list(range(len(found))):
            await asyncio.sleep(0.001)
            parts = [pair.router.answers[key].tokens for key in keys]
            found = {index: token for part in parts for index, token in part.items()}
    assert len(found) == sum(map(len, parts)), "a token came from both"
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True),
        SamplingParams(
            temperature=0.7, seed=6, max_tokens=60, ignore_eos=True, presence_penalty=1.0
        ),
    ],
    ids=["greedy", "sampled", "penalised"],
)
async def test_a_moved_sequence_keeps_its_tokens(pair: Pair, sampling: SamplingParams) -> None:
    for length in (3, 8, 41):
        prompt = random_ids(length)
        expected = (await pair.generate(prompt, sampling, local=True)).ids()
        submit = await start(pair, prompt, sampling)
        to = await move(pair, submit, 0, 1)
        await pair.router.answer(to)
        found = await merged(pair, submit.key, to, count=60)
        assert list(found.values()) == expected
    await pair.idle()


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "mistral-window"])
async def test_sequences_with_windows_move_at_a_later_try(family: str, tmp_path: Path) -> None:
    """What the receiver needs lies before the window, and is kept from the first try on."""
    path = save_family(family, tmp_path)
    async with running_pair(
        path, num_decode=2, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, decode_tp=2
    ) as pair:
        prompt, sampling = random_ids(97), replace(GREEDY, max_tokens=120)
        brake, router, tried = Brake(pair.decodes[0], 30), pair.router, 0
        submit = await start(pair, prompt, sampling, brake)
        while True:
            to = await move(pair, submit, 0, 1, tried=tried)
            while not router.answers[to].tokens and not router.answers[to].failures:
                await asyncio.sleep(0.001)
            if router.answers[to].tokens:
                break
            assert router.answers[to].failures[0].error.code is ErrorCode.HANDOFF_FAILED
            tried += 1
            brake.release(30 * (1 + tried))
            while len(router.answers[submit.key].tokens) < 30 * (1 + tried):
                await asyncio.sleep(0.001)
        await router.answer(to)
        found = await merged(pair, submit.key, to, count=120)
        assert list(found.values()) == Oracle(path).greedy(prompt, 120)
        assert tried < 3
        await pair.idle()


async def test_sequences_move_on_and_back_beside_others(pair: Pair, oracle: Oracle) -> None:
    """Both workers send and receive at the same time; each sequence moves twice."""
    long = replace(GREEDY, max_tokens=240)  # none ends before it has moved
    prompts = [random_ids(10 + 7 * i, seed=i) for i in range(6)]
    submits = [await start(pair, prompt, long) for prompt in prompts]
    brake = Brake(pair.decodes[1], 235)  # five tokens more than on the first

    async def travel(submit: Submit) -> list[int]:
        there = await move(pair, submit, 0, 1)
        brake.keys.add(there)
        while not pair.router.answers[there].tokens:
            assert not pair.router.answers[there].failures
            await asyncio.sleep(0.001)
        moved = replace(submit, key=there)
        # The second move's router knows the tokens of both workers.
        pair.router.answers[there].tokens = await merged(pair, submit.key, there)
        back = await move(pair, moved, 1, 0)
        await pair.router.answer(back)
        return list((await merged(pair, there, back, count=240)).values())

    outputs = await asyncio.gather(*map(travel, submits))
    assert outputs == [oracle.greedy(prompt, 240) for prompt in prompts]
    assert (
        sum(w.status().counters["worker_requests_total{outcome=moved}"] for w in pair.decodes) == 12
    )
    await pair.idle()


async def test_a_sequence_goes_on_where_it_is_when_its_move_fails(
    pair: Pair, oracle: Oracle
) -> None:
    prompt = random_ids(30)
    brake = Brake(pair.decodes[0], 50)
    submit = await start(pair, prompt, GREEDY, brake)
    gone = RequestKey("another", 0)
    to = await move(pair, submit, 0, 1, key=gone)  # a request that does not run there
    failed = await pair.router.answer(to)
    assert [f.error.code for f in failed.failures] == [ErrorCode.HANDOFF_FAILED]
    assert failed.failures[0].retriable
    brake.release()
    assert (await pair.router.answer(submit.key)).ids() == oracle.greedy(prompt, 60)
    await pair.idle()


async def test_a_sequence_that_is_cancelled_on_its_way_leaves_nothing(pair: Pair) -> None:
    for number in range(4):
        submit = await start(pair, random_ids(30, seed=number), GREEDY)
        to = await move(pair, submit, 0, 1)
        await asyncio.sleep(0.004 * number)
        await pair.router.cancel(submit.key, *pair.decode_refs)
        await pair.router.cancel(to, *pair.decode_refs)
    await pair.idle()


# --- with a router --------------------------------------------------------------------------------

OUTPUT = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    write_model_text(folder)
    return save_tiny_llama(folder, vocab_size=512, max_position_embeddings=1024)


async def outputs(stack: Stack, prompts: list[list[int]], count: int = OUTPUT) -> list[list[int]]:
    """What clients get, all at once."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": count, "ignore_eos": True, "seed": 4}

    async def ask(prompt: list[int]) -> list[int]:
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"http://{stack.http}/v1/completions",
                json=body | {"prompt": prompt, "temperature": 0.8, "return_token_ids": True},
            ) as answer,
        ):
            said = await answer.json()
            assert answer.status == 200, said
            ids: list[int] = said["choices"][0]["token_ids"]
            return ids

    return await asyncio.gather(*map(ask, prompts))


def moved(stack: Stack) -> list[int]:
    return [worker.status().counters[MOVED] for worker in stack.pair.decodes]


@pytest.mark.parametrize("how", ["drain", "role"])
async def test_streams_leave_a_worker_that_does_not_want_them(folder: str, how: str) -> None:
    """No request fails, every token is the one that would have come, and the worker is idle long
    before its streams have ended."""
    prompts = [[40 + (7 * i + j) % 300 for j in range(20 + 9 * i)] for i in range(6)]
    options: dict[str, Any] = {"prefill_config": SMALL_STEPS, "decode_config": SMALL_STEPS}
    async with running_stack(folder, num_decode=2, **options) as stack:
        expected = await outputs(stack, prompts)
        asked = asyncio.create_task(outputs(stack, prompts))
        source = stack.pair.decodes[0]
        brakes = Brake(source, OUTPUT - 20), Brake(stack.pair.decodes[1], OUTPUT - 10)
        while source.status().load.running < 2:
            await asyncio.sleep(0.01)
        if how == "drain":
            assert await source.drain(120)
        else:
            client = stack.pair.router.pool.get(stack.pair.decode_refs[0].address)
            await client.call(methods.ROLE, RoleCommand(role=Role.PREFILL), timeout_s=60)
            while source.status().load.running:
                await asyncio.sleep(0.01)
        assert not asked.done()
        for brake in brakes:
            brake.release()
        assert await asked == expected
        assert moved(stack)[0] >= 2
        assert moved(stack)[1] == 0
        if how == "role":
            # It computes prompts now, also while the first prefill worker takes none.
            await stack.pair.prefills[0].drain(120)
            assert await outputs(stack, prompts) == expected
            assert source.status().load.tokens_per_second > 0
        await stack.pair.idle()


async def test_streams_move_to_a_worker_that_has_just_begun_to_decode(folder: str) -> None:
    prompts = [[40 + (7 * i + j) % 300 for j in range(20 + 3 * i)] for i in range(12)]
    config = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=32)
    options: dict[str, Any] = {"prefill_config": config, "decode_config": config}
    async with running_stack(folder, num_decode=2, **options) as stack:
        expected = await outputs(stack, prompts, 400)
        pair, router = stack.pair, stack.router
        router.set_workers([*pair.prefill_refs, pair.decode_refs[0]])
        brake = Brake(pair.decodes[0], 380)
        asked = asyncio.create_task(outputs(stack, prompts, 400))
        while pair.decodes[0].status().load.running < 12:
            await asyncio.sleep(0.01)
        router._workers.balance(time.monotonic())
        router.set_workers([*pair.prefill_refs, *pair.decode_refs])
        while not pair.decodes[1].status().load.running:
            router._workers.balance(time.monotonic())
            await asyncio.sleep(0.01)
        brake.release()
        assert await asked == expected
        assert moved(stack)[0] >= 1
        await pair.idle()
