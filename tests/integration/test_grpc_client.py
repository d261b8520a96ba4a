"""The Python client through real workers: what it says, its errors, and outputs whose connection is
cut in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from baton_client import AsyncBatonClient, BatonClient, CallError, Retry, WholeOutput
from tests.support.cutting_proxy import cutting_proxy
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig

CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=64)
HELLO = [{"role": "user", "content": "hello"}]
#: Bytes after which connections are cut, in turn: some before the first token, most after a few.
CUTS = (300, 500, 200, 100, 400)
#: Tries until the time is up: a connection that is cut need not bring a token, and when one is cut
#: before it stands, gRPC makes none for a second.
FAST = Retry(attempts=10_000, first_s=0.01, max_s=0.02)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_model_text(folder)
    save_tiny_llama(folder, vocab_size=512)
    async with running_stack(str(folder), prefill_config=CONFIG, decode_config=CONFIG) as stack:
        yield stack
        await stack.pair.idle()
        assert stack.router.num_requests == 0


def answers(address: str, requests: list[dict[str, Any]]) -> list[WholeOutput]:
    with BatonClient(address, retry=FAST, timeout_s=60) as client:
        return [client.generate(**one).answer() for one in requests]


async def answers_async(address: str, requests: list[dict[str, Any]]) -> list[WholeOutput]:
    async with AsyncBatonClient(address, retry=FAST, timeout_s=60) as client:
        return [await client.generate(**one).answer() for one in requests]


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "the quick brown", "max_tokens": 40, "seed": 7, "temperature": 1.5},
    {"prompt": list(range(40, 75)), "max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"messages": HELLO, "max_tokens": 40, "seed": 3, "repetition_penalty": 1.3},
    {"messages": HELLO, "seed": 5, "temperature": 1.2, "top_p": 0.9},
    {"prompt": "hi", "seed": 5, "min_tokens": 12, "temperature": 1.4, "stop": ["zzz"]},
]


async def test_a_cut_stream_goes_on_with_the_same_tokens(stack: Stack) -> None:
    """Synchronous and asynchronous, chat and completion, sampled and greedy."""
    whole = await asyncio.to_thread(answers, stack.grpc, REQUESTS)
    assert [len(answer.token_ids[0]) >= 12 for answer in whole] == [True] * len(REQUESTS)
    for one, expected in zip(REQUESTS, whole, strict=True):
        async with cutting_proxy(stack.grpc, CUTS) as address:
            (cut,) = await asyncio.to_thread(answers, address, [one])
        async with cutting_proxy(stack.grpc, CUTS[1:]) as address:
            (cut_async,) = await answers_async(address, [one])
        for again in (cut, cut_async):
            assert again.token_ids == expected.token_ids
            assert again.texts == expected.texts
            assert again.finish_reasons == expected.finish_reasons
            assert again.usage is not None
            assert expected.usage is not None
            assert again.usage.total_tokens == expected.usage.total_tokens


async def test_a_cut_stream_that_cannot_go_on_raises_with_what_it_had(stack: Stack) -> None:
    requests = {"prompt": "the quick", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    for more in ({"presence_penalty": 0.5}, {"n": 2}, {"resume": False}):
        cut = asyncio.Event()
        proxy = cutting_proxy(stack.grpc, [800], cut)
        async with proxy as address, AsyncBatonClient(address, timeout_s=60) as client:
            stream = client.generate(**requests, **more)
            with pytest.raises(CallError) as caught:
                async for part in stream:
                    if part.token_ids:
                        cut.set()
        assert caught.value.status is grpc.StatusCode.UNAVAILABLE
        assert 0 < len(caught.value.token_ids) < 60
        assert list(caught.value.token_ids) == stream.so_far.token_ids[0]


async def test_errors_name_code_and_field(stack: Stack) -> None:
    async with AsyncBatonClient(stack.grpc) as client:
        with pytest.raises(CallError) as caught:
            await client.generate("hi", max_tokens=0).answer()
        assert (caught.value.code, caught.value.param) == ("invalid_request", "max_tokens")
        assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(CallError) as caught:
            await client.generate("hi", model="other").answer()
        assert caught.value.code == "not_found"
        with pytest.raises(CallError) as late:
            await client.generate("hi", max_tokens=400, ignore_eos=True, timeout_s=0.01).answer()
        assert late.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(TypeError, match="temprature"):
        client.generate("hi", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="prompt or messages"):
        client.generate()


async def test_nothing_answers(stack: Stack) -> None:
    tried = Retry(attempts=3, first_s=0.001, max_s=0.001)
    async with AsyncBatonClient("127.0.0.1:1", retry=tried) as client:
        for call in (client.models(), client.generate("hi").answer()):
            with pytest.raises(CallError, match=r"127\.0\.0\.1:1") as caught:
                await call
            assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_text_models_and_closed_streams(stack: Stack) -> None:
    def sync() -> tuple[list[int], str, str]:
        with BatonClient(stack.grpc, timeout_s=60) as client:
            ids = client.tokenize("the quick brown fox")
            with client.generate("the", max_tokens=400, ignore_eos=True) as stream:
                first = next(iter(stream))
                assert first.text == stream.so_far.text
                assert stream.request_id
            return ids, client.detokenize(ids), client.models()[0].id

    ids, text, name = await asyncio.to_thread(sync)
    assert (text, name) == ("the quick brown fox", "tiny")
    async with AsyncBatonClient(stack.grpc) as client:
        assert await client.tokenize("the quick brown fox") == ids
        async with client.generate("the", max_tokens=400, ignore_eos=True) as stream:
            async for part in stream:
                assert part.index == 0
                break
    await stack.pair.idle()  # the closed ones do not run on


async def test_structured_output_and_several_choices(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    async with AsyncBatonClient(stack.grpc) as client:
        for form in (
            {"structured_outputs": {"json": schema}},
            {"guided_json": schema},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                }
            },
        ):
            answer = await client.generate("x", max_tokens=40, n=2, seed=1, **form).answer()
            assert [json.loads(text)["a"] in (1, 2) for text in answer.texts] == [True, True]
            assert answer.finish_reasons == ["stop", "stop"]


@pytest.mark.parametrize(
    ("example", "arguments", "stdin", "expected"),
    [
        ("chat.py", ["what", "is", "it?"], "", "tokens]"),
        ("many.py", [], "the quick\nhello\n", "\n'hello': "),
    ],
)
async def test_the_examples_run(
    stack: Stack, example: str, arguments: list[str], stdin: str, expected: str
) -> None:
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(root / "examples" / "grpc" / example), stack.grpc, *arguments),
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(stdin.encode())
    assert process.returncode == 0
    shown = output.decode(errors="replace")
    assert expected in shown
    assert "failed: " not in shown
