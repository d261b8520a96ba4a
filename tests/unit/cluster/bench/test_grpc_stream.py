import pytest

from cluster.bench.grpc_stream import request_of
from cluster.bench.load import Target, closed_loop, timed_arrivals
from cluster.bench.workload import Ask, Style
from protocol.ids import Role
from tests.support.router_front_ends import open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import write_model_text

ASK = Ask(prompt_tokens=20, output_tokens=6)


@pytest.fixture
async def front_end(tmp_path):
    fleet = StubFleet()
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with open_front_ends(fleet, write_model_text(tmp_path)) as front_ends:
        yield front_ends
    await fleet.stop()


def target(front_end, **style):
    settings = {"vocab_size": 400} | style
    address = front_end.router.addresses.grpc
    return Target(url=f"grpc://{address}", style=Style(**settings), timeout_s=60)


async def test_every_token_is_seen_and_counted(front_end):
    results = await closed_loop(target(front_end), [ASK] * 6, concurrency=3)
    assert [result.error for result in results] == [""] * 6
    assert {(result.prompt_tokens, result.output_tokens) for result in results} == {(20, 6)}
    assert all(len(result.chunk_times) == 6 for result in results)
    assert all(result.sent <= result.chunk_times[0] <= result.ended for result in results)


async def test_the_timeline_comes_when_it_is_asked_for(front_end):
    (plain,) = await closed_loop(target(front_end), [ASK], concurrency=1)
    (told,) = await closed_loop(target(front_end, timeline=True), [ASK], concurrency=1)
    assert plain.timeline is None
    assert {"tokenize", "route"} <= {span["phase"] for span in told.timeline["spans"]}


async def test_a_refusal_is_a_failure_with_its_reason(front_end):
    (result,) = await timed_arrivals(target(front_end, model="other"), [ASK])
    assert result.error.startswith("NOT_FOUND")


async def test_an_absent_server_fails_every_request(front_end):
    gone = target(front_end)
    await front_end.router.stop()
    results = await closed_loop(gone, [ASK] * 2, concurrency=1)
    assert all(result.error for result in results)


def test_both_front_ends_are_asked_the_same():
    body = Style(model="m", seed=3).body(ASK, 7)
    request = request_of(body)
    assert list(request.prompt_token_ids.ids) == body["prompt"]
    assert (request.model, request.max_tokens, request.ignore_eos) == ("m", 6, True)
    assert (request.stream, request.stream_options.include_usage) == (True, True)
    chat = request_of(Style(api="chat").body(ASK, 7)).chat
    assert chat.messages[0].role == "user"
    assert (
        request_of(Style(text=True).body(ASK, 7)).prompt == Style(text=True).body(ASK, 7)["prompt"]
    )
