"""The same request through every API, over real workers: the same tokens, ends and usage; and long
conversations that find their prefix cached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from protocol.messages import TokenEvent
from protocol.wire import inference_pb2 as pb
from router.dispatch.request_run import OutputStream
from tests.support import services
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig

CONFIG = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=256)
CONTEXT = 2048
HI: list[Any] = [{"role": "user", "content": "hello you, how are you today"}]
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
TURNS = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Text, why it ended, tokens of the prompt and of the output.
Said = tuple[str, str, int, int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_text(folder, context=CONTEXT)
    save_tiny_llama(folder, vocab_size=512, max_position_embeddings=CONTEXT)
    options: dict[str, Any] = {"prefill_config": CONFIG, "decode_config": CONFIG}
    async with running_stack(str(folder), **options) as stack:
        yield stack
        await stack.pair.idle()
        assert stack.router.num_requests == 0


class Apis:
    """One client for each API; every method returns what was said."""

    def __init__(self, stack: Stack) -> None:
        url = f"http://{stack.http}"
        self.gpt = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        self.claude = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        self.channel = grpc.aio.insecure_channel(stack.grpc)
        self.inference = services.InferenceStub(self.channel)

    async def close(self) -> None:
        await self.gpt.close()
        await self.claude.close()
        await self.channel.close()

    async def chat(self, limit: int, stop: list[str] | None) -> Said:
        answer = await self.gpt.chat.completions.create(
            model="tiny", messages=HI, max_tokens=limit, stop=stop, **SAMPLING
        )
        (choice,), usage = answer.choices, answer.usage
        tokens = usage.prompt_tokens, usage.completion_tokens
        return (choice.message.content, choice.finish_reason, *tokens)

    async def over_grpc(self, limit: int, stop: list[str] | None) -> Said:
        request = pb.GenerateRequest(max_tokens=limit, stop=stop or (), **SAMPLING)
        request.chat.messages.add(role="user", content=HI[0]["content"])
        text, finish, usage = "", "", pb.Usage()
        async for message in self.inference.Generate(request, timeout=60):
            for choice in message.choices:
                text += choice.text
                finish = choice.finish_reason or finish
            usage = message.usage
        return text, finish, usage.prompt_tokens, usage.completion_tokens

    async def completion(self, limit: int, stop: list[str] | None) -> Said:
        """The chat's prompt as token ids."""
        url = str(self.gpt.base_url).removesuffix("v1/") + "tokenize"
        tokens = await self.gpt.post(url, body={"messages": HI}, cast_to=object)
        answer = await self.gpt.completions.create(
            model="tiny", prompt=tokens["tokens"], max_tokens=limit, stop=stop, **SAMPLING
        )
        (choice,), usage = answer.choices, answer.usage
        return choice.text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens

    async def message(self, limit: int, stop: list[str] | None, *, stream: bool = False) -> Said:
        fields: Any = {"model": "tiny", "messages": HI, "max_tokens": limit}
        fields |= {"extra_body": {**SAMPLING, "stop_sequences": stop}}
        if stream:
            async with self.claude.messages.stream(**fields) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.claude.messages.create(**fields)
        text = "".join(block.text for block in answer.content)
        ends = {"max_tokens": "length", "end_turn": "stop", "stop_sequence": "stop"}
        usage = answer.usage
        prompt = usage.input_tokens + usage.cache_read_input_tokens
        return text, ends[answer.stop_reason], prompt, usage.output_tokens

    async def response(self, limit: int, *, stream: bool = False) -> Said:
        fields: Any = {"model": "tiny", "input": HI, "max_output_tokens": limit}
        fields |= {"extra_body": SAMPLING}
        if stream:
            async with self.gpt.responses.stream(**fields) as events:
                *_, last = [event async for event in events]  # the helper knows no incomplete one
            answer = last.response
        else:
            answer = await self.gpt.responses.create(**fields)
        finish = "stop" if answer.status == "completed" else "length"
        usage = answer.usage
        return answer.output_text, finish, usage.input_tokens, usage.output_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apis(stack: Stack) -> AsyncIterator[Apis]:
    apis = Apis(stack)
    yield apis
    await apis.close()


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[OutputStream, list[int]]:
    """The token ids of every output, in their order."""
    found: dict[OutputStream, list[int]] = {}
    take = OutputStream.take

    def taken(stream: OutputStream, event: TokenEvent) -> bool:
        found.setdefault(stream, []).append(event.token)
        return take(stream, event)

    monkeypatch.setattr(OutputStream, "take", taken)
    return found


async def test_every_api_says_the_same(apis: Apis, outputs: dict[OutputStream, list[int]]) -> None:
    expected = await apis.chat(24, None)
    assert expected[3] == 24
    assert await apis.over_grpc(24, None) == expected
    assert await apis.completion(24, None) == expected
    for stream in (False, True):
        assert await apis.message(24, None, stream=stream) == expected
        assert await apis.response(24, stream=stream) == expected
    first, *others = outputs.values()
    assert (len(first), len(others)) == (24, 6)
    assert all(ids == first for ids in others)
    assert len({stream.job.prompt_ids for stream in outputs}) == 1
    stop = [expected[0][8:11]]
    cut = await apis.chat(24, stop)
    assert cut[:2] == (expected[0].partition(stop[0])[0], "stop")
    assert await apis.over_grpc(24, stop) == cut
    assert await apis.completion(24, stop) == cut
    for stream in (False, True):
        assert await apis.message(24, stop, stream=stream) == cut


async def chat_turns(apis: Apis) -> AsyncIterator[tuple[int, int]]:
    """Tokens of the prompt, and how many of them were cached, of every turn."""
    messages = list[Any]()
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"what about {turn}"})
        answer = await apis.gpt.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0
        )
        messages.append(answer.choices[0].message.model_dump())
        usage = answer.usage
        yield usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


async def message_turns(apis: Apis) -> AsyncIterator[tuple[int, int]]:
    messages = list[Any]()
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"what about {turn}, dear"})
        answer = await apis.claude.messages.create(
            model="tiny", messages=messages, max_tokens=8, extra_body={"temperature": 0}
        )
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        messages.append({"role": "assistant", "content": content})
        read = answer.usage.cache_read_input_tokens
        yield answer.usage.input_tokens + read, read


async def response_turns(apis: Apis) -> AsyncIterator[tuple[int, int]]:
    last = None
    for turn in range(TURNS):
        answer = await apis.gpt.responses.create(
            model="tiny",
            input=f"and what about {turn}",
            max_output_tokens=8,
            temperature=0,
            previous_response_id=last,
        )
        last = answer.id
        yield answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


async def completion_turns(apis: Apis) -> AsyncIterator[tuple[int, int]]:
    text = ""
    for turn in range(TURNS):
        text += f"Question {turn}: what about it?\nAnswer:"
        answer = await apis.gpt.completions.create(
            model="tiny", prompt=text, max_tokens=8, temperature=0
        )
        text += answer.choices[0].text + "\n"
        usage = answer.usage
        yield usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


async def grpc_turns(apis: Apis) -> AsyncIterator[tuple[int, int]]:
    request = pb.GenerateRequest(max_tokens=8, temperature=0, stream=False)
    for turn in range(TURNS):
        request.chat.messages.add(role="user", content=f"so what about {turn}")
        (answer,) = [message async for message in apis.inference.Generate(request, timeout=60)]
        request.chat.messages.add(role="assistant", content=answer.choices[0].text)
        usage = answer.usage
        yield usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "turns", [chat_turns, message_turns, response_turns, completion_turns, grpc_turns]
)
async def test_a_conversation_finds_its_prefix_cached(apis: Apis, turns: Any) -> None:
    found = [turn async for turn in turns(apis)]
    assert len(found) == TURNS
    could_be = sum(before for before, _ in found[:-1])  # the prompt before, whatever was answered
    assert sum(cached for _, cached in found) >= 0.9 * could_be
    assert all(cached <= prompt for prompt, cached in found)
