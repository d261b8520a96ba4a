"""Workers that stand still for a while, like stopped processes: prompts do not wait for them while
others can take them, and nothing is computed twice or left when they go on. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from observability import metrics
from protocol.ids import RequestKey, Role
from protocol.messages import Cancel
from rpc.methods import CANCEL
from tests.support.random_workers import RandomWorker
from tests.support.router_world import Output, RouterWorld, VirtualLoop, run_in

PROMPT = tuple(range(40))
TOKENS = (7, 8, 9)
#: What a prompt and three tokens take at most where nothing stands still: some events come late.
AT_MOST_S = 3.0
#: Until the router goes elsewhere; without that it would wait for these seconds.
FOUND_S = 0.8
TIMEOUT_S = 20.0

Story = Callable[[RouterWorld], Coroutine[None, None, None]]
Tell = Callable[[Story], None]


@pytest.fixture(params=range(5))
def tell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Run a story in a world of its own, at the end of which nothing is left."""

    def run(story: Story) -> None:
        world = RouterWorld(
            VirtualLoop(),
            request.param,
            fault_rate=0.0,
            local_prefill_tokens=0,
            local_gain_s=0.0,
            submit_timeout_s=TIMEOUT_S,
            silence_s=TIMEOUT_S,
        )

        async def whole() -> None:
            await story(world)
            await world.end()

        run_in(world, whole(), monkeypatch)

    return run


async def workers(world: RouterWorld, *roles: Role) -> list[RandomWorker]:
    found = [world.join(role) for role in roles]
    await asyncio.sleep(0.1)
    return found


async def ask(world: RouterWorld, name: str) -> float:
    """Seconds until an output has ended."""
    began = world.loop.now
    output = world.outputs[name] = Output(TOKENS, began + 2 * TIMEOUT_S, patient=True)
    await world.run_of(name, PROMPT, wants_timeline=False).run()
    assert tuple(output.got) == TOKENS
    assert world.begun[name] == 1
    return world.loop.now - began


@pytest.mark.parametrize("role", Role)
def test_a_prompt_goes_to_another_worker(tell: Tell, role: Role) -> None:
    async def story(world: RouterWorld) -> None:
        still, *_ = await workers(world, role, Role.PREFILL, Role.DECODE)
        still.stand_still(5.0)
        took = await asyncio.gather(*(ask(world, f"a{number}") for number in range(8)))
        assert FOUND_S - 0.1 < max(took) < FOUND_S + AT_MOST_S
        assert min(took) < AT_MOST_S
        assert not still.held
        num_left = world.count(metrics.RESUMES, cause=f"{role}_unanswered")
        assert num_left > 0
        # Later ones are not even sent there, until it goes on.
        assert max([await ask(world, f"b{number}") for number in range(4)]) < AT_MOST_S
        assert world.count(metrics.RESUMES, cause=f"{role}_unanswered") == num_left
        await asyncio.sleep(5.0)
        await asyncio.gather(*(ask(world, f"c{number}") for number in range(8)))
        assert still.num_submitted > 0
        for client in world.set.all():
            assert client.breaker._failures == 0

    tell(story)


def test_decode_computes_the_prompt_where_the_only_prefill_worker_stands_still(tell: Tell) -> None:
    async def story(world: RouterWorld) -> None:
        prefill, decode = await workers(world, Role.PREFILL, Role.DECODE)
        prefill.stand_still(5.0)
        assert FOUND_S - 0.1 < await ask(world, "a") < FOUND_S + AT_MOST_S
        assert (prefill.num_submitted, decode.num_submitted) == (0, 2)
        assert world.count(metrics.RESUMES, cause="prefill_unanswered") == 1

    tell(story)


def test_a_prompt_waits_for_the_only_decode_worker(tell: Tell) -> None:
    async def story(world: RouterWorld) -> None:
        _, decode = await workers(world, Role.PREFILL, Role.DECODE)
        decode.stand_still(4.0)
        assert 4.0 <= await ask(world, "a") < 4.0 + AT_MOST_S
        assert decode.num_submitted == 1
        assert world.count(metrics.RESUMES, cause="decode_unanswered") == 0

    tell(story)


def test_a_prompt_that_is_given_back_waits_for_no_answer_of_the_other_worker(tell: Tell) -> None:
    async def story(world: RouterWorld) -> None:
        prefill, decode = await workers(world, Role.PREFILL, Role.DECODE)
        decode.stand_still(5.0)
        asked = asyncio.create_task(ask(world, "a"))
        await asyncio.sleep(1.0)
        first, again = (RequestKey("a", number) for number in range(2))
        assert first in prefill.held
        (known,) = world.set.ready(Role.PREFILL)
        await known.calls.call(CANCEL, Cancel(keys=(first,), unless_begun=True))
        await asyncio.sleep(1.0)
        assert again in prefill.held
        assert 5.0 <= await asked < 5.0 + AT_MOST_S

    tell(story)


def test_a_client_that_leaves_leaves_nothing_on_a_worker_that_goes_on(tell: Tell) -> None:
    async def story(world: RouterWorld) -> None:
        _, decode = await workers(world, Role.PREFILL, Role.DECODE)
        decode.stand_still(4.0)
        asked = asyncio.create_task(ask(world, "a"))
        await asyncio.sleep(2.0)
        asked.cancel()
        await asyncio.sleep(3.0)
        assert not decode.held
        assert not world.begun["a"]

    tell(story)
