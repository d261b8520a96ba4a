"""Running sequences move between decode workers with their KV: the tokens stay those of
transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.errors import ErrorCode
from protocol.ids import RequestKey
from protocol.messages import MoveRequest, Submit, Ticket
from protocol.sampling import SamplingParams
from rpc import methods
from tests.support.pair import SECRET, SMALL_STEPS, Answer, Pair, running_pair
from tests.support.prompts import random_ids
from tests.support.tiny import Oracle

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


async def start(pair: Pair, prompt: list[int], sampling: SamplingParams) -> Submit:
    """A request that decodes on the first worker: what its router submitted."""
    key = await pair.router.submit(
        prompt, sampling, pair.decode_refs[0], None, layout=pair.decodes[0].status().layout
    )
    while len(pair.router.answers[key].tokens) < 3:
        await asyncio.sleep(0)
    return Submit(
        key=key,
        router_id=pair.router.router_id,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        time_left_s=60.0,
    )


async def move(pair: Pair, submit: Submit, source: int, target: int, **changes: Any) -> RequestKey:
    """Move it, as a router does; the key that it has there."""
    router, refs = pair.router, pair.decode_refs
    known = tuple(router.answers[submit.key].tokens.values())
    to = RequestKey(submit.key.request_id, submit.key.attempt + 1)
    router.answers[to] = Answer()
    ticket = Ticket(
        key=to,
        sender_epoch=refs[source].epoch,
        receiver_epoch=refs[target].epoch,
        num_blocks=pair.decodes[target].status().layout.pages_for(200),
        lifetime_s=60.0,
    ).signed(SECRET)
    arriving = replace(
        submit, key=to, output_ids=known, peer=refs[source], ticket=ticket, live=True
    )
    await router.pool.get(refs[target].address).call(methods.SUBMIT, arriving, timeout_s=10)
    leaving = MoveRequest(
        key=submit.key, to=to, ticket=ticket, num_output=len(known), peer=refs[target]
    )
    await router.pool.get(refs[source].address).call(
        methods.MOVE, replace(leaving, **changes), timeout_s=10
    )
    return to


@pytest.mark.parametrize("length", [3, 8, 41])
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
async def test_a_moved_sequence_keeps_its_tokens(
    pair: Pair, length: int, sampling: SamplingParams
) -> None:
    prompt = random_ids(length)
    expected = (await pair.generate(prompt, sampling, local=True)).ids()
    submit = await start(pair, prompt, sampling)
    to = await move(pair, submit, 0, 1)
    await pair.router.answer(to)
    first, second = pair.router.answers[submit.key].tokens, pair.router.answers[to].tokens
    assert not first.keys() & second.keys(), "a token came from both"
    assert list((first | second).values()) == expected
    assert sorted(first | second) == list(range(60))
    await pair.idle()


async def test_sequences_move_on_and_back_beside_others(pair: Pair, oracle: Oracle) -> None:
    """Both workers send and receive at the same time; each sequence moves twice."""
    prompts = [random_ids(10 + 7 * i, seed=i) for i in range(6)]
    submits = [await start(pair, prompt, GREEDY) for prompt in prompts]

    async def travel(submit: Submit) -> list[int]:
        there = await move(pair, submit, 0, 1)
        while not pair.router.answers[there].tokens:
            await asyncio.sleep(0.001)
        moved = replace(submit, key=there)
        tokens = pair.router.answers[submit.key].tokens
        # The second move's router knows the tokens of both workers.
        pair.router.answers[there].tokens = tokens | pair.router.answers[there].tokens
        back = await move(pair, moved, 1, 0)
        await pair.router.answer(back)
        everything = pair.router.answers[there].tokens | pair.router.answers[back].tokens
        return [everything[index] for index in sorted(everything)]

    outputs = await asyncio.gather(*map(travel, submits))
    assert outputs == [oracle.greedy(prompt, 60) for prompt in prompts]
    assert (
        sum(w.status().counters["worker_requests_total{outcome=moved}"] for w in pair.decodes) == 12
    )
    await pair.idle()


async def test_a_sequence_goes_on_where_it_is_when_its_move_fails(
    pair: Pair, oracle: Oracle
) -> None:
    prompt = random_ids(30)
    submit = await start(pair, prompt, GREEDY)
    gone = RequestKey("another", 0)
    to = await move(pair, submit, 0, 1, key=gone)  # a request that does not run there
    failed = await pair.router.answer(to)
    assert [f.error.code for f in failed.failures] == [ErrorCode.HANDOFF_FAILED]
    assert failed.failures[0].retriable
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
