"""The HTTP front end: shapes of answers, streams, headers, n, disconnects, probes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from observability import metrics
from protocol.errors import Internal
from protocol.ids import Role
from protocol.wire import inference_pb2 as pb
from router.config import DefaultsOf
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters, until
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import write_model_text

HELLO = [{"role": "user", "content": "hello"}]


async def events_of(
    front_ends: FrontEnds, path: str, **body: Any
) -> tuple[list[Any], dict[str, str]]:
    """The events of a stream, `[DONE]` as itself, and the headers."""
    async with front_ends.http.post(
        front_ends.url + path, json={"stream": True} | body
    ) as response:
        assert response.status == 200, await response.text()
        raw = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    return [e if e == "[DONE]" else json.loads(e) for e in events], response.headers.copy()


async def test_chat_answer(front_ends: FrontEnds) -> None:
    front_ends.fleet.workers[1].script = lambda s: letters("Hello there!")
    front_ends.fleet.workers[0].script = front_ends.fleet.workers[1].script
    status, body = await front_ends.post(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}
    )
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert abs(body["created"] - time.time()) < 60
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    _, tokens = await front_ends.post("/tokenize", {"messages": HELLO})
    assert tokens["count"] == usage["prompt_tokens"] == len(tokens["tokens"])


async def test_chat_stream(front_ends: FrontEnds) -> None:
    front_ends.say(letters("Hel🙂lo"))
    events, headers = await events_of(
        front_ends,
        "/v1/chat/completions",
        messages=HELLO,
        max_tokens=9,
        stream_options={"include_usage": True},
    )
    assert headers["Content-Type"].startswith("text/event-stream")
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    *chunks, last, done = events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    assert {chunk["object"] for chunk in events[:-1]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in events[:-1]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:]]
    assert contents == ["H", "e", "l", "", "", "", "🙂", "l", "o"]  # a chunk a token, of four bytes
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]


async def test_an_event_is_one_line_whatever_counts_as_its_end(front_ends: FrontEnds) -> None:
    front_ends.say(letters("a\u2028b\u2029c\x85d\ne"))
    body = {"prompt": "hello", "max_tokens": 14, "stream": True}
    async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
        lines = list(filter(None, (await response.text()).splitlines()))
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == "a\u2028b\u2029c\x85d\ne"


async def test_without_include_usage_there_is_no_usage(front_ends: FrontEnds) -> None:
    events, _ = await events_of(front_ends, "/v1/completions", prompt="hello", max_tokens=3)
    assert all("usage" not in event for event in events[:-1])
    assert all(event["object"] == "text_completion" for event in events[:-1])
    assert [event["choices"][0]["text"] for event in events[:-1]] == list("234")


@pytest.mark.parametrize("stop", [["34"], "4", ["zzz"], ["2"], ["789", "56"]])
async def test_a_stream_concatenates_to_the_whole_answer(front_ends: FrontEnds, stop: Any) -> None:
    fields = {"prompt": "hello", "max_tokens": 12, "stop": stop}
    events, _ = await events_of(front_ends, "/v1/completions", **fields)
    _, body = await front_ends.post("/v1/completions", fields)
    streamed = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert streamed == body["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [True, False])
async def test_n_choices_always(front_ends: FrontEnds, stream: bool) -> None:
    """n choices, their indices right, each with its own seed and complete."""
    for worker in front_ends.fleet.workers:
        worker.script = lambda s: letters("abcdefgh"[s.sampling.seed % 8] * 5)
    fields = {"prompt": ["hello", "world"], "n": 4, "max_tokens": 5, "seed": 0}
    if stream:
        events, _ = await events_of(front_ends, "/v1/completions", **fields)
        texts = dict.fromkeys(range(8), "")
        for event in events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        _, body = await front_ends.post("/v1/completions", fields)
        texts = {choice["index"]: choice["text"] for choice in body["choices"]}
        assert [choice["index"] for choice in body["choices"]] == list(range(8))
        assert body["usage"]["completion_tokens"] == 40
        _, hello = await front_ends.post("/tokenize", {"prompt": "hello"})
        _, world = await front_ends.post("/tokenize", {"prompt": "world"})
        assert body["usage"]["prompt_tokens"] == hello["count"] + world["count"]
    assert texts == {i: "abcd"[i % 4] * 5 for i in range(8)}


async def test_token_ids_on_request(front_ends: FrontEnds) -> None:
    fields = {"prompt": [30, 31, 32], "max_tokens": 4, "return_token_ids": True}
    events, _ = await events_of(front_ends, "/v1/completions", **fields)
    assert events[0]["choices"][0]["prompt_token_ids"] == [30, 31, 32]
    ids = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
    assert ids == [20, 21, 22, 23]
    assert all("prompt_token_ids" not in e["choices"][0] for e in events[1:-1])
    _, body = await front_ends.post("/v1/completions", fields)
    assert body["choices"][0]["token_ids"] == [20, 21, 22, 23]
    assert body["choices"][0]["prompt_token_ids"] == [30, 31, 32]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_timeline_on_request(front_ends: FrontEnds, stream: bool) -> None:
    fields = {"prompt": [30] * 20, "max_tokens": 3, "timeline": True}
    if stream:
        events, _ = await events_of(front_ends, "/v1/completions", **fields)
        timeline = events[-2]["timeline"]
        assert events[-2]["choices"] == []
    else:
        _, body = await front_ends.post("/v1/completions", fields)
        timeline = body["timeline"]
    phases = {span["phase"] for span in timeline["spans"]}
    assert phases == {"tokenize", "route", "prefill", "transfer", "decode"}
    assert timeline["arrival"] <= timeline["first_token"] <= timeline["end"]
    starts = [span["start"] for span in timeline["spans"]]
    assert starts == sorted(starts)
    transfer = next(span for span in timeline["spans"] if span["phase"] == "transfer")
    assert transfer["counts"] == {"bytes": 4096}
    assert front_ends.router.metrics.value(metrics.HANDOFF_SIZE) >= 1


async def test_a_failure_in_mid_stream_never_looks_like_success(front_ends: FrontEnds) -> None:
    decode = front_ends.fleet.workers[1]
    decode.fail_after, decode.fail_retriable = 4, False
    decode.fail_error = Internal("the engine broke")
    body = {"prompt": [30] * 6, "max_tokens": 20}
    events, _ = await events_of(front_ends, "/v1/completions", **body)
    assert events[-1]["error"]["message"] == "the engine broke"
    assert events[-1]["error"]["code"] == "internal"
    assert "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert len(events) == 5
    status, answer = await front_ends.post("/v1/completions", body)
    assert (status, answer["error"]["message"]) == (500, "the engine broke")


async def test_a_failure_before_the_first_token_keeps_its_status(front_ends: FrontEnds) -> None:
    for worker in front_ends.fleet.workers:
        worker.fail_after, worker.fail_retriable = 0, False
        worker.fail_error = Internal("broken")
    status, answer = await front_ends.post("/v1/completions", {"prompt": [30] * 6, "stream": True})
    assert (status, answer["error"]["code"]) == (500, "internal")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_work(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, stream: bool
) -> None:
    worker = await fleet.add(Role.DECODE, delay_s=0.02)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": "hello", "max_tokens": 400, "stream": stream}
        request = asyncio.create_task(
            front_ends.http.post(front_ends.url + "/v1/completions", json=body)
        )
        await until(lambda: worker.running)
        if stream:
            response = await request
            await response.content.readany()
            response.close()
        else:
            request.cancel()
        await until(lambda: not worker.running)
        await until(lambda: front_ends.router.num_requests == 0)
        failures = front_ends.router.metrics.value(
            metrics.REQUEST_FAILURES, door="http", code="cancelled"
        )
        assert failures == 1


async def test_a_slow_reader_does_not_stop_the_output_from_ending(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    worker = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": "hello", "max_tokens": 480, "stream": True}
        async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
            await until(lambda: not worker.running)
            raw = (await response.read()).decode()
    assert raw.count('"finish_reason":"length"') == 1
    assert raw.endswith("data: [DONE]\n\n")


async def test_the_bound_on_requests(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE, delay_s=0.02)
    async with make_front_ends(fleet, max_requests=4, retry_after_s=2.5) as front_ends:
        body = {"prompt": "hello", "max_tokens": 20}
        running = [asyncio.create_task(front_ends.post("/v1/completions", body)) for _ in range(4)]
        await until(lambda: front_ends.router.num_requests == 4)
        async with front_ends.http.post(front_ends.url + "/v1/completions", json=body) as response:
            assert not any(task.done() for task in running)  # at once
            assert response.status == 429
            assert response.headers["retry-after"] == "3"
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 4
        assert (await front_ends.post("/v1/completions", body | {"n": 5}))[0] == 400
        assert (await front_ends.post("/v1/completions", body | {"n": 4}))[0] == 200


async def test_models(front_ends: FrontEnds) -> None:
    async with front_ends.http.get(front_ends.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert model["precision"] == {"prefill": ["fp8"], "decode": ["int4"]}
    async with front_ends.http.get(front_ends.url + "/v1/models/tiny") as response:
        assert await response.json() == model


async def test_names_of_the_model(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    names = {"served_model_name": "org/model", "model_aliases": ("m",)}
    async with make_front_ends(fleet, **names) as front_ends:
        for name in ("org/model", "m", None):
            status, body = await front_ends.post(
                "/v1/completions", {"prompt": "hello", "model": name, "max_tokens": 1}
            )
            assert (status, body["model"]) == (200, "org/model")
        assert (await front_ends.post("/v1/completions", {"prompt": "x", "model": "tiny"}))[
            0
        ] == 404
        async with front_ends.http.get(front_ends.url + "/v1/models/org/model") as response:
            assert response.status == 200


async def test_tokenize_and_back(front_ends: FrontEnds) -> None:
    status, body = await front_ends.post("/tokenize", {"prompt": "hello 🙂"})
    assert (status, body["max_model_len"]) == (200, 512)
    assert body["count"] == len(body["tokens"])
    assert await front_ends.post("/detokenize", {"tokens": body["tokens"]}) == (
        200,
        {"prompt": "hello 🙂"},
    )
    assert (await front_ends.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}
    assert (await front_ends.post("/detokenize", {"tokens": [1]}))[1] == {"prompt": "<|im_start|>"}


async def test_probes_and_metrics(front_ends: FrontEnds) -> None:
    async def get(path: str) -> tuple[int, str]:
        async with front_ends.http.get(front_ends.url + path) as response:
            return response.status, await response.text()

    assert (await get("/health"))[0] == 200
    assert (await get("/ready"))[0] == 200
    assert "version" in json.loads((await get("/version"))[1])
    await front_ends.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    status, text = await get("/metrics")
    assert status == 200
    assert 'baton_generation_tokens_total{model_name="tiny"} 3.0' in text
    assert 'baton_workers{model_name="tiny",role="decode",state="ready"} 1.0' in text
    for worker in front_ends.fleet.workers:
        await worker.stop()
    await until(lambda: not front_ends.router.ready)
    status, body = await get("/ready")
    assert status == 503
    assert json.loads(body)["error"]["code"] == "unavailable"
    assert (await get("/health"))[0] == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_health_answers_while_a_huge_prompt_is_refused(
    front_ends: FrontEnds, path: str
) -> None:
    """5 MB of text: neither does it hold up the event loop nor is all of it tokenised."""
    body = json.dumps({"prompt": "hello world " * 420_000}).encode()
    big = asyncio.create_task(front_ends.post(path, body))
    worst, start = 0.0, time.process_time()
    while not big.done():
        begin = time.thread_time()  # the loop's own: what else runs on the machine does not count
        async with front_ends.http.get(front_ends.url + "/health") as response:
            assert response.status == 200
        worst = max(worst, time.thread_time() - begin)
    status, answer = await big
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert worst < 0.4  # seconds if it ran on the loop
    assert time.process_time() - start < 3


async def test_a_long_prompt_that_fits_is_tokenised_whole(front_ends: FrontEnds) -> None:
    status, body = await front_ends.post("/tokenize", {"prompt": "hello world " * 300})
    assert (status, body["count"]) == (200, len(body["tokens"]))


async def test_answers_on_a_kept_connection_are_not_delayed(front_ends: FrontEnds) -> None:
    """Nagle's algorithm against delayed acknowledgements would cost 40 ms each."""
    await front_ends.post("/v1/completions", {"prompt": ""})
    (connection,) = front_ends.router._http._server._connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_idle_connections_are_kept(front_ends: FrontEnds) -> None:
    assert front_ends.router.config.keep_alive_s > 75
    body = {"prompt": "hello", "max_tokens": 1}
    for _ in range(3):
        await front_ends.post("/v1/completions", body)
    assert len(front_ends.http.connector._conns) == 1  # one connection served them all


@pytest.mark.parametrize(("source", "temperature"), [("model", 0.6), ("openai", 1.0)])
async def test_sampling_defaults_are_the_models_unless_switched_off(
    fleet: StubFleet,
    make_front_ends: MakeFrontEnds,
    tmp_path: Path,
    source: str,
    temperature: float,
) -> None:
    worker = await fleet.add(Role.DECODE)
    write_model_text(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    settings = {"model_path": str(tmp_path), "sampling_defaults": DefaultsOf(source)}
    async with make_front_ends(fleet, **settings) as front_ends:
        for fields in ({}, {"temperature": 0.2}):
            body = {"prompt": "hello", "max_tokens": 2} | fields
            assert (await front_ends.post("/v1/completions", body))[0] == 200
            request = pb.GenerateRequest(prompt="hello", max_tokens=2, **fields)
            async for _ in front_ends.inference.Generate(request):
                pass
    seen = [submit.sampling.temperature for submit in worker.submitted]
    assert seen == [temperature, temperature, 0.2, 0.2]


async def test_a_path_without_its_beginning_says_so(front_ends: FrontEnds) -> None:
    for path in ("/chat/completions", "/models"):
        status, answer = await front_ends.post(path, {})
        assert status == 404
        assert answer["error"]["message"] == f"unknown path: {path}; did you mean /v1{path}?"


async def test_errors_below_messages_have_the_form_of_that_api(front_ends: FrontEnds) -> None:
    status, answer = await front_ends.post("/v1/messages/batches", {})
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    async with front_ends.http.get(front_ends.url + "/v1/messages") as response:
        assert response.status == 405
        answer = await response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["request_id"] == response.headers["x-request-id"]
