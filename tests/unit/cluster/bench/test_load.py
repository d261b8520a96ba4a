import asyncio
import time

import pytest

from cluster.bench.load import Target, closed_loop, timed_arrivals
from cluster.bench.measure import summarise
from cluster.bench.runs import first_model
from cluster.bench.workload import Ask, Style
from tests.unit.cluster.bench.stub_server import Stub, running

ASK = Ask(prompt_tokens=5, output_tokens=4)


def target(url, **changes):
    return Target(url=url, style=Style(model="m"), timeout_s=60, **changes)


class Patient(Stub):
    """Answers none before so many are there."""

    def __init__(self, at_once, **changes):
        super().__init__(**changes)
        self.at_once = at_once
        self.all_started = asyncio.Event()

    async def stream(self, *asked):
        if self.running == self.at_once:
            self.all_started.set()
        await self.all_started.wait()
        await super().stream(*asked)


async def test_a_closed_loop_keeps_exactly_n_requests_in_flight():
    stub = Patient(4, delay=0.005)
    async with running(stub) as url:
        results = await closed_loop(target(url), [ASK] * 24, concurrency=4)
    assert len(results) == 24
    assert not any(result.error for result in results)
    assert stub.most_running == 4
    assert stub.connections == 4
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(set(prompts)) == 24


async def test_what_is_sent():
    stub = Stub()
    async with running(stub) as url:
        await closed_loop(target(url, api_key="k"), [ASK], concurrency=3)
    body = stub.bodies[0]
    assert stub.paths == ["/v1/completions"]
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert stub.headers[0]["Authorization"] == "Bearer k"


async def test_times_are_no_shorter_than_the_server_takes_and_add_up():
    stub = Stub(delay=0.1, gap=0.05)
    async with running(stub) as url:
        (result,) = await closed_loop(target(url), [ASK], concurrency=1)
    assert result.output_tokens == 4
    assert result.prompt_tokens == 5
    assert result.ttft >= 0.1
    assert len(result.gaps) == 3
    assert result.e2e >= 0.1 + 3 * 0.05
    assert result.e2e == pytest.approx(result.ttft + sum(result.gaps), abs=1e-9)
    assert result.tpot == pytest.approx(sum(result.gaps) / 3, abs=1e-9)


async def test_glued_tokens_count_as_one_chunk_but_as_all_their_tokens():
    async with running(Stub(glue=2, gap=0.01)) as url:
        (result,) = await closed_loop(target(url), [ASK], concurrency=1)
    assert result.output_tokens == 4
    assert len(result.chunk_times) == 4  # each event is content; two share one arrival
    assert result.gaps[0] == 0.0


async def test_chat_ignores_the_chunk_without_content():
    stub = Stub(delay=0.02)
    style = Style(api="chat", model="m")
    async with running(stub) as url:
        (result,) = await closed_loop(Target(url=url, style=style), [ASK], concurrency=1)
    assert stub.paths == ["/v1/chat/completions"]
    assert stub.bodies[0]["messages"][0]["role"] == "user"
    assert len(result.chunk_times) == 4


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        ("status", "HTTP 429"),
        ("close", "closed the connection"),
        ("short", "3 output tokens instead of 4"),
        ("event", "worker lost"),
        ("no end", "without [DONE]"),
    ],
)
async def test_failures_are_counted_with_their_reason(fail, error):
    async with running(Stub(fail=fail)) as url:
        results = await closed_loop(target(url), [ASK] * 3, concurrency=1)
    assert [error in result.error for result in results] == [True] * 3
    summary = summarise(results)
    assert (summary.failures, summary.output_tokens) == (3, 0)
    assert sum(summary.errors.values()) == 3


async def test_a_silent_server_is_given_up():
    async with running(Stub(delay=1000)) as url:
        slow = Target(url=url, style=Style(), timeout_s=0.2)
        (result,) = await closed_loop(slow, [ASK], concurrency=1)
    assert result.error == "timed out"


async def test_an_absent_server_fails_every_request():
    async with running(Stub()) as url:
        pass
    results = await closed_loop(target(url), [ASK] * 2, concurrency=1)
    assert all(result.error for result in results)


async def test_a_server_that_closes_after_each_answer_is_no_failure():
    stub = Stub(close=True)
    async with running(stub) as url:
        results = await closed_loop(target(url), [ASK] * 3, concurrency=1)
    assert [result.error for result in results] == [""] * 3
    assert stub.connections == 3


async def test_arrivals_never_come_before_their_time_and_overlap():
    asks = [Ask(at=0.05 * n, prompt_tokens=3, output_tokens=2) for n in range(4)]
    stub = Patient(len(asks))
    async with running(stub) as url:
        began = time.perf_counter()
        results = await timed_arrivals(target(url), asks)
    assert all(r.sent >= began + ask.at for r, ask in zip(results, asks, strict=True))
    assert [r.error for r in results] == [""] * 4


async def test_the_model_is_asked_for():
    async with running(Stub()) as url:
        assert await first_model(url) == "stub-model"
