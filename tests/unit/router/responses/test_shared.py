"""Two routers of one cluster: a response stored by one is known to the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from protocol.ids import Role
from router.auth.keys import hashed
from tests.support.router_front_ends import FrontEnds, open_front_ends, until
from tests.support.stub_workers import StubFleet

KEYS = {"ann": "sk-ann", "bob": "sk-bob"}
Clients = list[openai.AsyncOpenAI]


def tell_all(routers: list[FrontEnds]) -> None:
    targets = [each.router.addresses.metrics for each in routers]
    responses = {each.router.router_id: each.router.addresses.responses for each in routers}
    for each in routers:
        each.router.set_routers(targets, responses)


@pytest_asyncio.fixture
async def routers(
    fleet: StubFleet, model_folder: Path, tmp_path: Path
) -> AsyncIterator[list[FrontEnds]]:
    file = tmp_path / "keys.yaml"
    lines = [f"- name: {name}\n  hash: '{hashed(key)}'\n" for name, key in KEYS.items()]
    file.write_text("keys:\n" + "".join(lines))
    await fleet.add(Role.DECODE)
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(
                open_front_ends(
                    fleet, model_folder, api_keys_file=str(file), served_model_name="tiny"
                )
            )
            for _ in range(2)
        ]
        tell_all(found)
        yield found


def client(front_ends: FrontEnds, name: str = "ann") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=front_ends.url + "/v1", api_key=KEYS[name], max_retries=0, timeout=30
    )


async def said(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(model="tiny", max_output_tokens=4, **fields)


async def test_another_router_continues_and_reads_it(
    routers: list[FrontEnds], fleet: StubFleet
) -> None:
    here, there = map(client, routers)
    first = await said(here, input="hello")
    second = await said(there, input="go on", previous_response_id=first.id)
    assert second.status == "incomplete"
    local = await said(here, input="go on", previous_response_id=first.id)
    prompts = [submit.prompt_ids for submit in fleet.workers[0].submitted]
    assert prompts[1] == prompts[2]
    assert len(prompts[1]) > len(prompts[0]) + 4
    third = await said(here, input="and on", previous_response_id=second.id, stream=False)
    assert third.usage.input_tokens > local.usage.input_tokens
    counted = await there.responses.input_tokens.count(
        model="tiny", input="go on", previous_response_id=first.id
    )
    assert counted.input_tokens == len(prompts[1])
    read = await there.responses.retrieve(first.id)
    assert read.model_dump() == (await here.responses.retrieve(first.id)).model_dump()
    items = [item async for item in there.responses.input_items.list(first.id)]
    assert items[0].content[0].text == "hello"
    await there.responses.delete(first.id)
    for either in (here, there):
        with pytest.raises(openai.NotFoundError):
            await either.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is stored here"):
        await said(there, input="x", previous_response_id=first.id)


async def test_another_router_cancels_it(routers: list[FrontEnds], fleet: StubFleet) -> None:
    fleet.workers[0].delay_s = 0.05
    here, there = map(client, routers)
    running = await here.responses.create(
        model="tiny", input="hello", background=True, max_output_tokens=200
    )
    await until(lambda: fleet.workers[0].submitted)
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await said(there, input="x", previous_response_id=running.id)
    assert (await there.responses.cancel(running.id)).status == "cancelled"
    await until(lambda: routers[0].router.num_requests == 0)
    done = await said(here, input="hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        await there.responses.cancel(done.id)


async def test_another_key_does_not_find_it(routers: list[FrontEnds]) -> None:
    first = await said(client(routers[0]), input="hello")
    for front_ends in routers:
        stranger = client(front_ends, "bob")
        for call in (stranger.responses.retrieve, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        with pytest.raises(openai.BadRequestError):
            await said(stranger, input="x", previous_response_id=first.id)
    assert (await client(routers[1]).responses.retrieve(first.id)).id == first.id


async def test_responses_go_with_their_router(routers: list[FrontEnds]) -> None:
    first = await said(client(routers[0]), input="hello")
    there = client(routers[1])
    await routers[0].router.stop()
    with pytest.raises(openai.InternalServerError) as caught:  # it may come back
        await there.responses.retrieve(first.id)
    assert caught.value.status_code == 503
    tell_all(routers[1:])
    with pytest.raises(openai.NotFoundError, match="is gone"):
        await there.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await said(there, input="x", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
