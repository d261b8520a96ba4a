"""One request asked every way (both front ends, streamed and whole), and what each of them said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import httpx
import pytest

from protocol.errors import STATUSES, ErrorCode
from protocol.wire import inference_pb2 as pb
from tests.support import services
from tests.support.wire_requests import to_message

#: What OpenAI's clients know under another name.
_OPENAI_CODES = {"model_not_found": "not_found", "invalid_api_key": "unauthenticated"}
#: (token, log-probability, likeliest tokens with theirs)
Entry = tuple[str, float | None, dict[str, float]]


@dataclass(slots=True)
class ChoiceSaid:
    """One choice, its parts put together."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    entries: list[Entry] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


@dataclass(slots=True)
class Said:
    """An answer of either front end in one form; `code`, `param`, `message` of a failure."""

    choices: dict[int, ChoiceSaid] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)  # tokens of prompts, of outputs
    code: str = ""
    param: str | None = None
    message: str = ""

    @property
    def only(self) -> ChoiceSaid:
        """The one choice of a request that went well."""
        assert not self.code, f"{self.code}: {self.message} ({self.param})"
        (choice,) = self.choices.values()
        return choice

    @property
    def refusal(self) -> tuple[str, str | None]:
        """Code and field of a failure."""
        return self.code, self.param

    @property
    def exact(self) -> Said:
        """All but log-probabilities, whose last bits depend on the batch."""
        bare = {i: replace(choice, entries=[]) for i, choice in self.choices.items()}
        return replace(self, choices=bare)

    def choice(self, index: int) -> ChoiceSaid:
        return self.choices.setdefault(index, ChoiceSaid())


class BothFrontEnds:
    """Clients of one router."""

    def __init__(self, http: str, grpc_address: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://{http}", timeout=60)
        options = [("grpc.max_send_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(grpc_address, options=options)
        self.inference = services.InferenceStub(self.channel)

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close()

    async def ask(self, **fields: Any) -> Said:
        """The answer of both front ends, streamed and whole; fails unless all four are the same."""
        said = await self.every_way(**fields)
        for other in said[1:]:
            assert other.exact == said[0].exact, f"{fields}\n{other}\n{said[0]}"
            for index, choice in said[0].choices.items():
                assert_close(other.choices[index].entries, choice.entries)
        return said[0]

    async def every_way(self, **fields: Any) -> list[Said]:
        """HTTP whole, HTTP streamed, gRPC whole, gRPC streamed."""
        ways = [
            (front_end, stream)
            for front_end in (self.over_http, self.over_grpc)
            for stream in (0, 1)
        ]
        return await asyncio.gather(
            *(front_end({**fields, "stream": bool(s)}) for front_end, s in ways)
        )

    async def over_http(self, fields: dict[str, Any]) -> Said:
        """The answer of the HTTP front end."""
        chat = "messages" in fields
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {**fields, "return_token_ids": True}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        answer = await self.http.post(path, json=body)
        said = Said()
        if answer.status_code != 200:
            return _failed(said, answer.json()["error"], answer.status_code)
        events = [answer.json()] if not fields.get("stream") else _events(answer.text)
        for event in events:
            if "error" in event:
                return _failed(said, event["error"], None)
            for choice in event["choices"]:
                _take_json(said.choice(choice["index"]), choice, chat=chat)
            if event.get("usage"):
                usage = event["usage"]
                said.usage = usage["prompt_tokens"], usage["completion_tokens"]
        return said

    async def over_grpc(self, fields: dict[str, Any]) -> Said:
        """The answer of the gRPC front end."""
        said = Said()
        try:
            async for message in self.inference.Generate(to_message(fields), timeout=60):
                for choice in message.choices:
                    _take_message(said.choice(choice.index), choice, chat="messages" in fields)
                if message.HasField("usage"):
                    said.usage = message.usage.prompt_tokens, message.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            said.code = str(trailers.get("baton-error-code", error.code().name))
            said.param = trailers.get("baton-error-param")
            said.message = error.details() or ""
            said.choices, said.usage = {}, (0, 0)
        return said


def assert_close(entries: Sequence[Entry], others: Sequence[Entry]) -> None:
    """The same tokens, and values but for rounding."""
    assert [entry[0] for entry in entries] == [other[0] for other in others]
    for (_, value, top), (_, other, other_top) in zip(entries, others, strict=True):
        assert value == pytest.approx(other, abs=1e-3)
        assert top == pytest.approx(other_top, abs=1e-3)


def _events(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    done = events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in (events[:-1] if done else events)]
    assert done != ("error" in parsed[-1]), "a stream ends in [DONE] or in an error"
    return parsed


def _failed(said: Said, error: dict[str, Any], status: int | None) -> Said:
    said.code = _OPENAI_CODES.get(error["code"], error["code"])
    if status is not None:
        assert status == STATUSES[ErrorCode(said.code)].http
    said.param, said.message = error["param"], error["message"]
    said.choices, said.usage = {}, (0, 0)
    return said


def _take_json(said: ChoiceSaid, choice: dict[str, Any], *, chat: bool) -> None:
    part = choice.get("message") or choice.get("delta") or choice
    said.text += part.get("content" if chat else "text") or ""
    said.ids += choice.get("token_ids") or []
    said.finish = choice["finish_reason"] or said.finish
    for i, call in enumerate(part.get("tool_calls") or []):
        function = call["function"]
        _take_call(said.calls, call.get("index", i), function.get("name"), function["arguments"])
    logprobs = choice.get("logprobs")
    if logprobs and chat:
        for entry in logprobs["content"]:
            top = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            said.entries.append((entry["token"], entry["logprob"], top))
    elif logprobs:
        rows = zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
        said.entries += [(token, value, dict(top or {})) for token, value, top in rows]


def _take_message(said: ChoiceSaid, choice: pb.Choice, *, chat: bool) -> None:
    said.text += choice.text
    said.ids += choice.token_ids
    if choice.HasField("finish_reason"):
        said.finish = choice.finish_reason
    for call in choice.tool_calls:
        name = call.name if call.HasField("name") else None
        _take_call(said.calls, call.index, name, call.arguments)
    for entry in choice.logprobs:
        value = entry.logprob if entry.HasField("logprob") else None
        top = _top(entry.top)
        if not chat and value is not None:  # as OpenAI's completions: the token is always there
            top.setdefault(entry.token, value)
        said.entries.append((entry.token, value, top))


def _top(entries: Sequence[pb.TokenLogprob]) -> dict[str, float]:
    top: dict[str, float] = {}
    for entry in entries:
        top.setdefault(entry.token, entry.logprob)
    return top


def _take_call(calls: list[tuple[str, str]], index: int, name: str | None, arguments: str) -> None:
    if name is not None and index == len(calls):
        calls.append((name, ""))
    calls[index] = (calls[index][0], calls[index][1] + arguments)
