"""A client of Baton's gRPC front end that notes when each message of a stream arrives.

As in http_stream, messages stay bytes while tokens arrive and are read when the stream has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from google.protobuf.json_format import MessageToDict
from grpc import aio

from baton_client.channel import GENERATE, call_metadata, channel_options
from baton_client.requests import generate_request
from cluster.bench.measure import Result
from cluster.client_tls import ClientTls
from protocol.wire import inference_pb2 as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """A whole stream; times are of time.perf_counter."""

    sent: float
    ended: float
    pieces: tuple[tuple[float, bytes], ...]
    error: str = ""


class GrpcConnection:
    """One connection, any number of requests."""

    def __init__(
        self, address: str, *, timeout_s: float, api_key: str = "", tls: ClientTls | None = None
    ) -> None:
        self._channel = (
            aio.secure_channel(address, tls.files.credentials(), channel_options())
            if tls
            else aio.insecure_channel(address, channel_options())
        )
        self._generate: Any = self._channel.unary_stream(
            GENERATE, request_serializer=wire.GenerateRequest.SerializeToString
        )
        self._metadata = call_metadata(api_key)
        self._timeout_s = timeout_s

    async def ask(
        self, request: wire.GenerateRequest, expected_tokens: int | None
    ) -> Callable[[], Result]:
        """Send a request; what reads its stream, once that has ended, whether well or not."""
        pieces: list[tuple[float, bytes]] = []
        error = ""
        sent = time.perf_counter()
        call = self._generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                pieces.append((time.perf_counter(), cast(bytes, message)))  # noqa: PERF401
        except aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        ended = pieces[-1][0] if pieces and not error else time.perf_counter()
        answer = _Messages(sent=sent, ended=ended, pieces=tuple(pieces), error=error)
        return partial(_read, answer, expected_tokens)

    async def close(self) -> None:
        await self._channel.close()


def request_of(body: dict[str, Any]) -> wire.GenerateRequest:
    """The message that asks for the same as an HTTP body of `workload.Style`; without a name it is
    the served model that is asked."""
    fields: Any = {name: value for name, value in body.items() if value != ""}
    return generate_request(fields.pop("prompt", None), fields.pop("messages", None), fields)


def _read(answer: _Messages, expected_tokens: int | None) -> Result:
    """The result of one stream. `expected_tokens` is checked when given."""
    times: list[float] = []
    tokens = 0
    last = wire.GenerateResponse()
    for when, data in answer.pieces:
        last = wire.GenerateResponse.FromString(data)
        fresh = sum(len(choice.token_ids) for choice in last.choices)
        if fresh:
            tokens += fresh
            times.append(when)
    problem = answer.error or next(_problems(last, tokens, expected_tokens), "")
    if problem:
        return Result(sent=answer.sent, ended=answer.ended, error=problem)
    timeline = MessageToDict(last.timeline, preserving_proto_field_name=True)
    return Result(
        sent=answer.sent,
        ended=answer.ended,
        chunk_times=tuple(times),
        prompt_tokens=last.usage.prompt_tokens,
        output_tokens=tokens,
        timeline=timeline if last.HasField("timeline") else None,
    )


def _problems(last: wire.GenerateResponse, tokens: int, expected: int | None) -> Iterator[str]:
    if not last.HasField("usage"):
        yield "the stream ended without usage"
    if not tokens:
        yield "no tokens"
    if tokens != last.usage.completion_tokens:
        yield f"{tokens} tokens came, {last.usage.completion_tokens} were counted"
    if expected is not None and tokens != expected:
        yield f"{tokens} output tokens instead of {expected}"
