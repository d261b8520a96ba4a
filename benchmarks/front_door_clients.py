"""Three ways to ask for a stream of tokens. While tokens arrive they only note bytes and times."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from grpc import aio

from benchmarks.http_stream import Answer, Connection
from benchmarks.measure import read_answer
from benchmarks.stub_router import read_refs
from benchmarks.stub_worker import SECRET
from protocol.ids import RequestKey, Role
from protocol.messages import EventBatch, Submit, Subscribe
from protocol.sampling import SamplingParams
from protocol.wire import inference_pb2 as pb
from rpc.methods import EVENTS, SUBMIT
from rpc.service import ControlClient

PROMPT = "The front door of a system that serves large language models, seen from the outside."
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """When a request was sent and when each of its tokens came, in seconds of perf_counter."""

    sent: float
    times: tuple[float, ...] = ()
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive tokens."""
        return [b - a for a, b in itertools.pairwise(self.times)]


class Client(ABC):
    """A way to ask. Answers are read after the run, when nobody waits for the processor."""

    async def open(self) -> None:  # noqa: B027 - most have nothing to open
        """Connect."""

    @abstractmethod
    async def ask(self, tokens: int) -> Any:
        """One request; its raw answer."""

    @abstractmethod
    def read(self, answer: Any, tokens: int) -> Stream:
        """What an answer says; an error unless it has `tokens` tokens."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""


class HttpDoor(Client):
    """Server-sent events, a connection for each request in flight."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Connection] = []

    async def ask(self, tokens: int) -> Answer:
        """POST /v1/completions."""
        connection = self._idle.pop() if self._idle else Connection(self._url)
        body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        answer = await connection.post("/v1/completions", body, timeout_s=_TIMEOUT_S)
        self._idle.append(connection)
        return answer

    def read(self, answer: Answer, tokens: int) -> Stream:
        """One event for each token."""
        result = read_answer(answer, expected_tokens=tokens)
        return Stream(sent=result.sent, times=result.chunk_times, error=result.error)

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._idle:
            connection.close()


@dataclass(slots=True)
class _Messages:
    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


class GrpcDoor(Client):
    """baton.v1.Inference/Generate over a few connections."""

    def __init__(self, address: str, *, channels: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [aio.insecure_channel(address, options) for _ in range(channels)]
        self._calls: Iterator[aio.UnaryStreamMultiCallable[Any, Any]] = itertools.cycle(
            channel.unary_stream(
                "/baton.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
            )
            for channel in self._channels
        )

    async def ask(self, tokens: int) -> _Messages:
        """Generate, the messages left as bytes."""
        request = pb.GenerateRequest(prompt=PROMPT, max_tokens=tokens, ignore_eos=True)
        answer = _Messages(time.perf_counter())
        call = next(self._calls)(request, timeout=_TIMEOUT_S)
        try:
            async for message in call:
                answer.pieces.append((time.perf_counter(), cast(bytes, message)))
        except aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
        return answer

    def read(self, answer: _Messages, tokens: int) -> Stream:
        """One message for each token."""
        times: list[float] = []
        for when, data in answer.pieces:
            times += [
                when for choice in pb.GenerateResponse.FromString(data).choices if choice.text
            ]
        error = answer.error
        if not error and len(times) != tokens:
            error = f"{len(times)} messages with text instead of {tokens}"
        return Stream(sent=answer.sent, times=tuple(times), error=error)

    async def close(self) -> None:
        """Disconnect."""
        for channel in self._channels:
            await channel.close()


class Direct(Client):
    """Straight from the workers over the control protocol, as a router does."""

    def __init__(self, workers: str) -> None:
        self._refs = {ref.role: ref for ref in read_refs(workers)}
        self._clients = {
            role: ControlClient(ref.address, secret=SECRET) for role, ref in self._refs.items()
        }
        self._numbers = itertools.count()
        self._streams: dict[RequestKey, tuple[list[float], asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open both event streams."""
        ready = [asyncio.Event() for _ in self._clients]
        for client, event in zip(self._clients.values(), ready, strict=True):
            self._tasks.append(asyncio.create_task(self._follow(client, event)))
        for event in ready:
            await event.wait()

    async def ask(self, tokens: int) -> Stream:
        """Submit to both and wait for the last token."""
        key = RequestKey(f"direct-{next(self._numbers)}")
        times, done = self._streams[key] = ([], asyncio.Event())
        submit = Submit(
            key=key,
            router_id="direct",
            prompt_ids=tuple(range(1000, 1016)),
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0),
            deadline=time.time() + _TIMEOUT_S,
        )
        sent = time.perf_counter()
        await asyncio.gather(
            *(
                client.call(SUBMIT, replace(submit, peer=self._other(role)), timeout_s=_TIMEOUT_S)
                for role, client in self._clients.items()
            )
        )
        await done.wait()
        return Stream(sent=sent, times=tuple(times))

    def read(self, answer: Stream, tokens: int) -> Stream:
        """It is read already."""
        return answer

    async def close(self) -> None:
        """Disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def _other(self, role: Role) -> Any:
        return self._refs[Role.DECODE if role is Role.PREFILL else Role.PREFILL]

    async def _follow(self, client: ControlClient, ready: asyncio.Event) -> None:
        async for batch in client.stream(EVENTS, Subscribe(router_id="direct")):
            ready.set()
            self._take(batch)

    def _take(self, batch: EventBatch) -> None:
        now = time.perf_counter()
        for token in batch.tokens:
            times, done = self._streams[token.key]
            times.append(now)
            if token.finish is not None:
                done.set()
